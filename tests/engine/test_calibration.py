"""Calibration: the path probability at first, the share of accepted candidates later; old counts fade."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card.engine.calibration import _BIN_STARTS, Calibration, Calibrations
from card.tree.nodes import Candidates

probs = st.floats(1e-4, 1.0)
depths = st.integers(1, 20)


def tree(*nodes: tuple[int, float]) -> Candidates:
    """Return candidates from (parent index, path probability)."""
    depth: list[int] = []
    for parent, _ in nodes:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    order = tuple(range(len(nodes)))
    parents = tuple(parent for parent, _ in nodes)
    return Candidates(order, order, parents, tuple(math.log(prob) for _, prob in nodes), tuple(depth))


def chain(length: int, prob: float = 0.9) -> Candidates:
    return tree(*[(idx - 1, prob ** (idx + 1)) for idx in range(length)])


@given(depth=depths, prob=probs)
@settings(max_examples=80)
def test_without_observations_the_path_probability_itself_is_returned(depth: int, prob: float) -> None:
    assert Calibration().probability(depth, math.log(prob)) == pytest.approx(prob)


def test_scores_just_above_zero_and_of_minus_infinity_are_probabilities_too() -> None:
    calibration = Calibration()
    for score, prob in ((1e-7, 1.0), (-math.inf, 0.0)):
        assert calibration.probability(1, score) == prob
        calibration.observe(1, score, False)
    assert calibration.probability(1, -math.inf) == 0.0
    assert calibration.report()[0].predicted_mean == pytest.approx(0.5)


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 30])
@pytest.mark.parametrize("prob", [0.01, 0.4, 0.97, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_after_many_observations_the_accepted_share_is_returned(depth: int, prob: float, share: float) -> None:
    calibration, chance = Calibration(), random.Random(1)
    for _ in range(2000):
        calibration.observe(depth, math.log(prob), chance.random() < share)
    assert calibration.probability(depth, math.log(prob)) == pytest.approx(share, abs=0.1)


@given(observed=st.lists(st.tuples(depths, probs, st.booleans()), max_size=40), depth=depths, prob=probs)
@settings(max_examples=60)
def test_an_estimate_is_the_prior_and_the_faded_counts_of_its_own_bin(
    observed: list[tuple[int, float, bool]], depth: int, prob: float
) -> None:
    calibration = Calibration()
    for seen_depth, seen_prob, was_accepted in observed:
        calibration.observe(seen_depth, math.log(seen_prob), was_accepted)

    def bin_of(depth: int, prob: float) -> tuple[int, int]:
        return sum(depth >= first for first in (2, 3, 5, 9)), bisect_right(_BIN_STARTS, math.log(prob))

    count = accepted = 0.0
    num_later = 0  # in the same bin
    for age, (seen_depth, seen_prob, was_accepted) in enumerate(reversed(observed)):
        if bin_of(seen_depth, seen_prob) == bin_of(depth, prob):
            weight = (1 - 1 / 300) ** num_later * 0.5 ** (age / 5000)
            count, accepted, num_later = count + weight, accepted + weight * was_accepted, num_later + 1
    expected = (accepted + 10 * prob) / (count + 10)
    assert calibration.probability(depth, math.log(prob)) == pytest.approx(expected)


def test_what_was_long_ago_is_forgotten() -> None:
    calibration = Calibration()
    for was_accepted in [True] * 3000 + [False] * 1500:
        calibration.observe(3, math.log(0.7), was_accepted)
    assert calibration.probability(3, math.log(0.7)) < 0.05


def test_a_bin_that_is_not_used_any_more_goes_back_to_the_path_probability() -> None:
    calibration = Calibration()
    for _ in range(1000):
        calibration.observe(1, math.log(0.7), False)
    spoilt = calibration.probability(1, math.log(0.7))
    for _ in range(60_000):
        calibration.observe(1, math.log(0.99), True)
    assert spoilt < 0.05
    assert calibration.probability(1, math.log(0.7)) > 0.65


# ---- trees ----------------------------------------------------------------------------------------------------------


def test_of_a_tree_the_nodes_on_the_accepted_path_count_as_accepted() -> None:
    nodes = tree((-1, 0.6), (-1, 0.3), (1, 0.25), (2, 0.2))
    whole, single = Calibration(), Calibration()
    whole.observe_tree(nodes, (1, 2))
    for depth, score, was_accepted in zip(nodes.depths, nodes.path_logprobs, (0, 1, 1, 0), strict=True):
        single.observe(depth, score, bool(was_accepted))
    assert whole.report() == single.report()
    for depth, score in zip(nodes.depths, nodes.path_logprobs, strict=True):
        assert whole.probability(depth, score) == single.probability(depth, score)


def test_a_report_gives_predicted_and_accepted_shares_per_depth() -> None:
    calibration = Calibration()
    calibration.observe_tree(chain(6, 0.9), (0, 1, 2))
    calibration.observe_tree(tree((-1, 0.5)), ())
    first, second, third, fourth, deepest = calibration.report()
    assert (first.first_depth, first.last_depth, first.count) == (1, 1, 2)
    assert first.predicted_mean == pytest.approx(0.7)
    assert first.accepted_share == 0.5
    assert (second.count, second.accepted_share) == (1, 1.0)
    assert (third.first_depth, third.last_depth, third.count, third.accepted_share) == (3, 4, 2, 0.5)
    assert (fourth.first_depth, fourth.last_depth, fourth.count, fourth.accepted_share) == (5, 8, 2, 0.0)
    assert (deepest.first_depth, deepest.last_depth, deepest.count) == (9, None, 0)
    assert deepest.predicted_mean == deepest.accepted_share == 0.0


def test_the_chance_of_the_next_layer_begins_at_three_quarters_of_the_nodes_own() -> None:
    calibration = Calibration()
    assert calibration.next_probability(0, 0.0) == pytest.approx(0.75)
    assert calibration.next_probability(3, math.log(0.8)) == pytest.approx(0.6)


def test_the_chance_of_the_next_layer_is_how_often_the_target_went_on_at_that_depth() -> None:
    calibration, chance = Calibration(), random.Random(2)
    for _ in range(2000):  # goes on with 0.9 from the root and with 0.4 from its children
        num_accepted = 0 if chance.random() > 0.9 else 1 if chance.random() > 0.4 else 2
        calibration.observe_tree(chain(2), range(num_accepted))
    assert calibration.next_probability(0, 0.0) == pytest.approx(0.9, abs=0.06)
    own = calibration.probability(1, math.log(0.9))
    assert calibration.next_probability(1, math.log(0.9)) / own == pytest.approx(0.4, abs=0.08)


def test_nodes_without_children_say_nothing_about_the_next_layer() -> None:
    calibration = Calibration()
    for _ in range(300):
        calibration.observe_tree(chain(1), (0,))  # accepted, and there is nothing below
    assert calibration.next_probability(1, 0.0) > 0.9


def test_the_root_is_certain_whatever_was_seen_of_its_children() -> None:
    calibration = Calibration()
    for _ in range(300):
        calibration.observe(1, 0.0, False)
    assert calibration.next_probability(0, 0.0) == pytest.approx(0.75)


def test_a_depth_never_seen_takes_the_share_of_the_other_depths() -> None:
    calibration = Calibration()
    for _ in range(300):
        calibration.observe_tree(chain(1), ())
    assert calibration.next_probability(10, 0.0) < 0.05


# ---- several writers ------------------------------------------------------------------------------------------------


@given(seen=st.lists(st.tuples(st.sampled_from("ab"), probs, st.booleans()), max_size=40), rows=st.data())
@settings(max_examples=80)
def test_siblings_are_together_never_likelier_than_their_parent(seen, rows) -> None:
    calibrations = Calibrations()
    for writer, prob, was_accepted in seen:
        calibrations.of(True, writer).observe(1, math.log(prob), was_accepted)
    nodes = rows.draw(st.lists(st.tuples(st.integers(-1, 9), probs), min_size=1, max_size=10))
    offer = tree(*[(min(parent, idx - 1), prob) for idx, (parent, prob) in enumerate(nodes)])
    names = tuple(rows.draw(st.sampled_from(("a", "b", "a+b"))) for _ in nodes)
    chances = calibrations.probabilities(True, replace(offer, writers=names))
    assert all(0.0 <= chance <= 1.0 for chance in chances)
    for parent in {-1, *range(len(nodes))}:
        below = [chance for chance, above in zip(chances, offer.parents, strict=True) if above == parent]
        assert sum(below) <= (1.0 if parent < 0 else chances[parent]) + 1e-9


def test_what_one_writer_is_sure_of_leaves_little_to_what_another_says_instead() -> None:
    calibrations = Calibrations()
    for writer, share in (("suffix", 0.95), ("recycling", 0.6)):
        for i in range(1000):
            calibrations.of(True, writer).observe(1, math.log(0.7), i * 37 % 100 < 100 * share)
    said = replace(tree((-1, 0.7), (-1, 0.7), (1, 0.7)), writers=("recycling", "suffix", "recycling"))
    other, sure, below = calibrations.probabilities(True, said)
    assert sure == pytest.approx(0.95, abs=0.02)
    assert other == pytest.approx(1 - sure)
    assert below <= sure
    alone = replace(tree((-1, 0.7)), writers=("recycling",))
    assert calibrations.probabilities(True, alone) == [pytest.approx(0.6, abs=0.02)]
