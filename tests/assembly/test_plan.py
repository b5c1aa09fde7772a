"""Draft lengths of methods of rounds: what is drafted beside one target pass takes no longer than that pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.assembly.plan import round_length
from card.config import DraftSettings
from card.methods import METHODS
from card.policy.cost import PassCost

OF_ROUNDS = sorted(name for name, method in METHODS.items() if method.length_from_latencies)


def cost(first_s: float, per_token_s: float = 0.0) -> PassCost:
    return PassCost(((1, first_s), (101, first_s + 100 * per_token_s)))


def length_of(name: str, *, ratio: float, per_token_s: float = 0.0, most: int = 100, **draft: object) -> int:
    """Return the length beside a target whose pass takes ``ratio`` drafter passes of one token, each of a second."""
    settings = DraftSettings(**draft)  # type: ignore[arg-type]
    target, drafter = cost(ratio), cost(1.0, per_token_s)
    return round_length(METHODS[name], settings, target=target, drafter=drafter, most=most)


def test_they_are_the_methods_in_which_target_and_drafter_meet_after_each_block() -> None:
    assert OF_ROUNDS == ["pearl", "specbranch", "ssd"]


@pytest.mark.parametrize("name", OF_ROUNDS)
def test_where_width_costs_nothing_a_round_is_as_long_as_the_target_takes(name: str) -> None:
    assert [length_of(name, ratio=ratio) for ratio in (7.0, 7.9, 12.0)] == [7, 7, 12]


@pytest.mark.parametrize("name", OF_ROUNDS)
def test_a_round_is_two_long_at_least_and_bounded(name: str) -> None:
    assert length_of(name, ratio=0.1) == 2
    assert length_of(name, ratio=99.0) == 16
    assert length_of(name, ratio=99.0, most=9) == 9


def test_wide_passes_make_short_rounds() -> None:
    wide = {"ratio": 12.0, "per_token_s": 0.1}
    assert length_of("pearl", **wide) == 12, "its passes run one token"
    assert length_of("specbranch", beam_width=6, **wide) == 9, "half of the passes run six: 1.0 * 4 + 1.5 * 5 = 11.5"
    assert length_of("ssd", fan_out=(3,), **wide) == 4, "15 outcomes: 4 passes of 2.4 s; 5 of 2.7 s are too long"
    assert length_of("ssd", fan_out=(6, 1), **wide) == 5, "11 outcomes: 5 passes of 2.0 s; 6 of 2.1 s are too long"


@given(
    name=st.sampled_from(OF_ROUNDS),
    ratio=st.floats(0.5, 40.0),
    per_token_s=st.floats(0.0, 0.5),
    beam_width=st.integers(1, 12),
    fan_out=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    most=st.integers(2, 40),
)
def test_its_passes_fit_and_those_of_a_longer_round_do_not(
    name: str, ratio: float, per_token_s: float, beam_width: int, fan_out: tuple[int, ...], most: int
) -> None:
    shape = {"beam_width": beam_width, "fan_out": fan_out}
    length = length_of(name, ratio=ratio, per_token_s=per_token_s, most=most, **shape)
    method, drafter = METHODS[name], cost(1.0, per_token_s)
    assert method.passes_of_round is not None

    def round_s(num_speculative_tokens: int) -> float:
        draft = method.shape(DraftSettings(num_speculative_tokens=num_speculative_tokens, **shape))
        widths = method.passes_of_round(draft)
        assert len(widths) == num_speculative_tokens, "one pass for each token of a chain"
        return sum(drafter.seconds(width) for width in widths)

    assert 2 <= length <= min(16, most)
    assert length == 2 or round_s(length) <= ratio
    assert length == min(16, most) or round_s(length + 1) > ratio
