"""The choice of candidates is the best of all possible ones, and its fixed point the best rate of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.engine.policy.choice import (
    best_by_depth,
    choose,
)
from card.machine.pass_cost import PassCost
from card.tree.nodes import NO_NODES, Nodes
from tests.examples import settings

Offers = list[list[float]]
Seconds = Callable[[int], float]

offers_of_some = st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=3)


@st.composite
def step_costs(draw: st.DrawFn) -> Seconds:
    """Return seconds that never fall: any rise, or none, from each number of tokens to the next."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0, 3.0]), min_size=30, max_size=30))
    times = list(itertools.accumulate(rises, initial=draw(st.floats(0.1, 5.0))))
    return lambda num_tokens: times[num_tokens]


def by_trying_all(
    offers: Offers, seconds: Seconds, prefill: int = 0, per_request: int = 99
) -> list[tuple[tuple[int, ...], float, float]]:
    """Return (counts, expected tokens, seconds) of every set of leading candidates within the caps."""
    falling = [list(itertools.accumulate(offer, min)) for offer in offers]
    found = []
    for counts in itertools.product(*[range(min(len(offer), per_request) + 1) for offer in offers]):
        taken = sum(sum(offer[:count]) for offer, count in zip(falling, counts, strict=True))
        found.append((counts, len(offers) + taken, seconds(len(offers) + prefill + sum(counts))))
    return found


@given(
    offers=offers_of_some,
    seconds=step_costs(),
    rate=st.floats(0, 10),
    prefill=st.integers(0, 8),
    per_request=st.integers(0, 5),
)
@settings(max_examples=40)
def test_no_other_leading_candidates_are_worth_more(
    offers: Offers, seconds: Seconds, rate: float, prefill: int, per_request: int
) -> None:
    chosen = choose(offers, seconds=seconds, rate=rate, num_prefill_tokens=prefill, max_per_request=per_request)
    values = {
        counts: expected - rate * pass_s
        for counts, expected, pass_s in by_trying_all(offers, seconds, prefill, per_request)
    }
    assert values[tuple(chosen)] == pytest.approx(max(values.values()))


@given(offers=offers_of_some, seconds=step_costs())
@settings(max_examples=40)
def test_choosing_at_the_rate_of_the_last_choice_ends_at_the_best_rate_of_all(offers: Offers, seconds: Seconds) -> None:
    rates = {counts: expected / pass_s for counts, expected, pass_s in by_trying_all(offers, seconds)}
    rate = 0.0
    for _ in range(20):
        rate = rates[tuple(choose(offers, seconds=seconds, rate=rate))]
    assert rate == pytest.approx(max(rates.values()))


def test_a_step_is_taken_if_enough_candidates_behind_it_pay_for_it() -> None:
    step = PassCost(((1, 1.0), (4, 1.0), (5, 2.0), (20, 2.0)))
    assert choose([[0.5] * 4], seconds=step.seconds, rate=1.0) == [3]
    assert choose([[0.5] * 6], seconds=step.seconds, rate=1.0) == [6]  # half a token for a second, then 1.5


def test_of_equally_good_choices_the_smaller_is_taken() -> None:
    assert choose([[0.5, 0.5]], seconds=lambda num_tokens: 1.0 * num_tokens, rate=0.5) == [0]
    assert choose([[0.5, 0.0]], seconds=lambda num_tokens: 1.0, rate=1.0) == [1]


def test_the_likeliest_candidates_over_all_requests_come_first() -> None:
    offers = [[0.9, 0.2], [0.8, 0.7, 0.6], []]
    assert choose(offers, seconds=lambda num_tokens: 1.0 * num_tokens, rate=0.65) == [1, 2, 0]


def test_a_likelier_candidate_behind_an_unlikely_one_counts_as_unlikely() -> None:
    assert choose([[0.1, 0.9], [0.5]], seconds=lambda num_tokens: 1.0 * num_tokens, rate=0.3) == [0, 1]


def test_prefill_tokens_can_make_candidates_too_dear() -> None:
    cost = PassCost(((1, 1.0), (16, 1.0), (64, 49.0)))
    assert choose([[0.9]], seconds=cost.seconds, rate=1.0) == [1]
    assert choose([[0.9]], seconds=cost.seconds, rate=1.0, num_prefill_tokens=30) == [0]


def test_the_best_chance_at_each_depth_is_that_of_any_branch() -> None:
    tree = Nodes((5, 6, 7, 8), (-1, -1, 0, 1), (0.0,) * 4, (1, 1, 2, 2))
    assert best_by_depth(tree, [0.5, 0.7, 0.4, 0.1]) == [0.7, 0.4]
    assert best_by_depth(NO_NODES, []) == []
