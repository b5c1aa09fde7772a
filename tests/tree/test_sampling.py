"""Logits to tokens: choices follow the law, and filters leave it what they should."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from card.backends.cuda.recorded_filters import filter_on_device
from card.config import SamplingParams, SamplingRule
from card.errors import SettingsError
from card.kernels.number_types import BFLOAT16
from card.tree.filters import filter_logits
from card.tree.logits import FloatArray, softmax
from card.tree.sampling import Sampler
from tests.examples import settings
from tests.sampling_laws import GREEDY, PLAIN, batches, clear_law, rules, slow_law

# ---- choice ---------------------------------------------------------------------------------------------------------


@given(logits=batches(), dtype=st.sampled_from([np.float32, np.float64, BFLOAT16, np.float16]))
def test_greedy_choice_is_the_first_of_the_largest_logits(logits: FloatArray, dtype: Any) -> None:
    chosen = Sampler(GREEDY, logits.shape[1]).choose(logits.astype(dtype), range(len(logits)))
    assert chosen == [row.index(max(row)) for row in logits.tolist()]


@given(logits=batches(), rule=rules, first=st.integers(0, 1000))
def test_choice_of_a_row_depends_on_no_other_row(logits: FloatArray, rule: SamplingRule, first: int) -> None:
    positions = [first + 3 * i for i in range(len(logits))]
    together = Sampler(rule, logits.shape[1]).choose(logits, positions)
    alone = [
        Sampler(rule, logits.shape[1]).choose(logits[i : i + 1].copy(), [position])[0]
        for i, position in reversed(list(enumerate(positions)))
    ]
    assert together == alone[::-1]


def test_choice_keeps_the_precision_of_float64() -> None:
    logits = np.array([[1.0, 1.0 + 1e-12, 0.0]])
    assert Sampler(GREEDY, 3).choose(logits, [0]) == [1]
    chosen = {Sampler(replace(PLAIN, top_k=1, seed=seed), 3).choose(logits, [0])[0] for seed in range(30)}
    assert chosen == {1}, "in float32 the first two would tie and both survive top-k"


def test_nothing_may_be_left_open_when_a_token_is_chosen() -> None:
    with pytest.raises(SettingsError, match="params must be resolved"):
        SamplingRule.of(SamplingParams())  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=9).resolved()
    assert SamplingRule.of(params) == SamplingRule(0.5, 7, 0.25, 0.125, 9)


# ---- law of the choice ----------------------------------------------------------------------------------------------

LOGITS = [0.3, -0.6, 1.1, 0.0, -1.4]
Choose = Callable[[FloatArray, range], list[int]]
ALL_ON = SamplingRule(temperature=1.4, top_k=4, top_p=0.85, min_p=0.25, seed=11)
NUM_DRAWS = 20_000
CHI_SQUARED_LIMIT = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 24: 60.0}  # by degrees of freedom; exceeded by one in 10,000


def chi_squared_excess(choose: Choose, rule: SamplingRule) -> float:
    """Return how far draws over as many positions are from the law of ``rule``, 1 being the limit."""
    drawn = choose(np.broadcast_to(np.array(LOGITS, np.float32), (NUM_DRAWS, 5)), range(NUM_DRAWS))
    counts = np.bincount(drawn, minlength=len(LOGITS))
    law = np.array(slow_law(LOGITS, rule))
    if counts[law == 0].any():
        return math.inf
    expected = law[law > 0] * NUM_DRAWS
    return float(((counts[law > 0] - expected) ** 2 / expected).sum() / CHI_SQUARED_LIMIT[len(expected) - 1])


@pytest.mark.parametrize(
    ("rule", "support"),
    [
        (ALL_ON, 3),
        (replace(PLAIN, temperature=0.6), 5),
        (replace(PLAIN, top_k=3), 3),
        (replace(PLAIN, top_p=0.8), 3),
        (replace(PLAIN, min_p=0.12), 4),
    ],
)
def test_choices_over_positions_follow_the_law(rule: SamplingRule, support: int) -> None:
    assert sum(p > 0 for p in slow_law(LOGITS, rule)) == support
    assert chi_squared_excess(Sampler(rule, 5).choose, rule) < 1


def _one_noise_for_all_positions(logits: FloatArray, positions: range) -> list[int]:
    return Sampler(ALL_ON, 5).choose(logits, [0] * len(positions))


def _temperature_after_the_noise(logits: FloatArray, positions: range) -> list[int]:
    return Sampler(replace(ALL_ON, temperature=1.0), 5).choose(logits, positions)


def _cut_mass_goes_to_the_best_token(logits: FloatArray, positions: range) -> list[int]:
    """Draw from the law before the cuts; what is ruled out becomes the best token, instead of renormalising."""
    kept = np.isfinite(filter_logits(logits[:1], ALL_ON)[0]).tolist()
    best = int(logits[0].argmax())
    drawn = Sampler(replace(PLAIN, temperature=ALL_ON.temperature, seed=11), 5).choose(logits, positions)
    return [token if kept[token] else best for token in drawn]


@pytest.mark.parametrize(
    "broken", [_one_noise_for_all_positions, _temperature_after_the_noise, _cut_mass_goes_to_the_best_token]
)
def test_the_law_test_finds_a_broken_rule(broken: Choose) -> None:
    assert chi_squared_excess(broken, ALL_ON) > 1


def test_choices_at_consecutive_positions_and_seeds_are_independent() -> None:
    law = np.array(slow_law(LOGITS, PLAIN))
    logits = np.broadcast_to(np.array(LOGITS, np.float32), (10_000, 5))
    drawn = np.array([Sampler(replace(PLAIN, seed=seed), 5).choose(logits, range(10_000)) for seed in (0, 1)])
    for first, second in ((drawn[0][:-1], drawn[0][1:]), (drawn[0], drawn[1])):
        counts = np.bincount(first * 5 + second, minlength=25)
        expected = np.outer(law, law).ravel() * len(first)
        assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARED_LIMIT[24]


# ---- filters --------------------------------------------------------------------------------------------------------


@given(rows=batches(), top_p=st.sampled_from([0.999, 0.9, 0.5, 0.05, 1e-9]))
def test_likely_tokens_found_without_sorting_all_are_those_of_sorting(rows: FloatArray, top_p: float) -> None:
    rows = rows + np.random.default_rng(0).random(rows.shape, np.float32) / 100  # no ties: their order is free
    ordered = softmax(-np.sort(-rows, axis=-1).astype(np.float64))
    if np.abs((ordered.cumsum(-1) - ordered) - top_p).min() < 1e-5:
        reject()  # so close that rounding decides it
    rule = replace(PLAIN, top_p=top_p)
    assert np.array_equal(filter_logits(rows, rule), filter_on_device(torch.from_numpy(rows), rule).numpy())


@settings(max_examples=100)
@given(
    row=st.lists(st.integers(-400, 400), min_size=1, max_size=12, unique=True).map(lambda ns: [n / 50 for n in ns]),
    rule=rules,
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_filtered_logits_have_the_law_of_a_slow_reference(row: list[float], rule: SamplingRule, dtype: Any) -> None:
    expected = np.array([clear_law(row, rule)], dtype)
    logits = np.array([row], dtype)
    filtered = filter_logits(logits, rule)
    assert filtered.dtype == dtype
    assert np.array_equal(logits, np.array([row], dtype)), "the argument is unchanged"
    assert np.array_equal(np.isfinite(filtered), expected > 0)
    np.testing.assert_allclose(softmax(filtered), expected, rtol=0, atol=1e-5)


@given(logits=batches(), rule=rules)
def test_filters_treat_each_row_as_if_alone_bit_for_bit(logits: FloatArray, rule: SamplingRule) -> None:
    together = filter_logits(logits, rule)
    for i in range(len(logits)):
        assert np.array_equal(filter_logits(logits[i : i + 1].copy(), rule)[0], together[i])


@given(logits=batches(), rule=rules)
def test_filters_never_rule_out_the_largest_logit_alone_or_everything(logits: FloatArray, rule: SamplingRule) -> None:
    filtered = filter_logits(logits, rule)
    assert np.array_equal(filtered.max(-1), (logits / np.float32(rule.temperature)).max(-1))


def test_many_tokens_far_below_the_best_one_count_if_their_mass_is_needed() -> None:
    logits = np.zeros((1, 100_001), np.float32)
    logits[0, 0] = 10.0  # e^10 = 22,026 times as likely as each of the others
    kept = np.isfinite(filter_logits(logits, replace(PLAIN, top_p=0.5))[0])
    assert int(kept.sum()) == pytest.approx(1 + (122_026 / 2 - 22_026), rel=1e-3)
    assert kept[: kept.sum()].all(), "of equal tokens the first"


def test_a_top_p_that_float32_rounds_to_0_keeps_the_likeliest_token():
    logits = np.array([[0.1, 2.0, 0.3]], np.float32)
    kept = np.isfinite(filter_logits(logits, replace(PLAIN, top_p=5e-324))[0]).tolist()
    assert kept == [False, True, False]


@settings(max_examples=150)
@given(logits=batches(), rule=rules, dtype=st.sampled_from([np.float32, np.float64]), seed=st.integers(0, 99))
def test_filters_are_those_of_recorded_steps_bit_for_bit(
    logits: FloatArray, rule: SamplingRule, dtype: npt.DTypeLike, seed: int
) -> None:
    logits = (logits + np.random.default_rng(seed).random(logits.shape) / 100).astype(
        dtype
    )  # ties: their order is free
    for row in logits.tolist():
        clear_law(row, rule)  # rounding decides nothing
    assert np.array_equal(filter_logits(logits, rule), filter_on_device(torch.from_numpy(logits), rule).numpy())
