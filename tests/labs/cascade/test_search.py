"""The cascade: it keeps what the cheap score cannot judge, counts its calls, and refuses what is no choice."""

from __future__ import annotations

import math
import time
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.cascade import cascade_argmin, spearman
from card.errors import ScoreError, SettingsError
from tests.waiting import PATIENCE_S

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
DISTINCT = st.lists(st.integers(-1000, 1000), min_size=1, max_size=60, unique=True)


@given(exact=DISTINCT, seed=st.integers(0, 99), reduction=st.floats(1.0, 100.0))
def test_the_exact_best_is_found_where_the_cheap_score_ranks_all_candidates_alike(exact, seed, reduction):
    choice = cascade_argmin(exact, lambda x: x**3, float, seed=seed, reduction=reduction)
    assert choice.best == min(exact) and choice.best_idx == exact.index(min(exact))
    if len(exact) > 1:
        assert choice.correlation == pytest.approx(1.0) and choice.num_kept == 1


@given(exact=SCORES, seed=st.integers(0, 99))
def test_all_candidates_are_kept_where_the_correlation_is_undefined(exact, seed):
    choice = cascade_argmin(exact, lambda _: 0.0, lambda x: x, seed=seed, measures_regret=True)
    assert choice.correlation is None
    assert choice.num_kept == choice.num_exact == len(exact)
    assert (choice.best, choice.regret) == (min(exact), 0.0)


@given(
    scores=st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9) | st.just(math.inf)), min_size=1, max_size=60),
    seed=st.integers(0, 99),
    reduction=st.floats(1.0, 100.0),
)
def test_the_choice_is_the_best_of_what_was_scored_exactly_and_each_candidate_is_scored_once(scores, seed, reduction):
    asked: list[int] = []

    def exact(idx: int) -> float:
        asked.append(idx)
        return scores[idx][1]

    choice = cascade_argmin(range(len(scores)), lambda idx: scores[idx][0], exact, seed=seed, reduction=reduction)
    assert len(asked) == len(set(asked)) == choice.num_exact == len(choice.exact_scores)
    assert set(choice.probe) <= set(asked) == set(choice.exact_scores)
    assert choice.best_score == min(scores[idx][1] for idx in asked) == scores[choice.best_idx][1]
    assert choice.num_cheap == len(scores) and choice.regret is None
    told = cascade_argmin(
        range(len(scores)),
        lambda idx: scores[idx][0],
        lambda idx: scores[idx][1],
        seed=seed,
        reduction=reduction,
        measures_regret=True,
    )
    assert (told.best_idx, told.num_exact) == (choice.best_idx, choice.num_exact)
    assert told.regret is not None and told.regret >= 0.0
    best = min(exact for _, exact in scores)
    assert told.regret == (0.0 if told.best_score == best else told.best_score - best)


def test_a_worse_agreement_keeps_more_and_an_opposite_ranking_keeps_the_most():
    exact = [float(i) for i in range(64)]
    alike = cascade_argmin(exact, lambda x: x, float)
    opposite = cascade_argmin(exact, lambda x: -x, float, reduction=2.0)
    assert (alike.num_kept, opposite.num_kept) == (1, 32)
    assert alike.num_exact <= 9


def test_the_probe_is_scored_exactly_while_all_candidates_are_scored_cheaply():
    cheap_began, exact_began = Event(), Event()
    calls: list[tuple[str, int]] = []

    def score(name: str, own: Event, other: Event, idx: int) -> float:
        own.set()
        assert other.wait(PATIENCE_S), f"the {name} score runs alone"
        calls.append((name, idx))
        return float(idx)

    choice = cascade_argmin(
        range(64),
        lambda idx: score("cheap", cheap_began, exact_began, idx),
        lambda idx: score("exact", exact_began, cheap_began, idx),
    )
    cheap, exact = ([idx for name, idx in calls if name == wanted] for wanted in ("cheap", "exact"))
    assert cheap == list(range(64)), "one cheap score each, probe included"
    assert tuple(exact[:8]) == choice.probe, "the probe comes first, an eighth"
    assert len(exact) == len(set(exact)) == choice.num_exact <= 9


@pytest.mark.parametrize("name", ["cheap", "exact"])
def test_after_a_failure_no_further_score_is_begun(name):
    other_began, has_failed, asked = Event(), Event(), list[int]()

    def fail(_: int) -> float:
        assert other_began.wait(PATIENCE_S)
        has_failed.set()
        raise ZeroDivisionError

    def go_on(idx: int) -> float:
        other_began.set()
        assert has_failed.wait(PATIENCE_S)
        asked.append(idx)
        time.sleep(0.01)  # the failure needs a moment to be told
        return float(idx)

    scores = {"cheap": go_on, "exact": go_on} | {name: fail}
    with pytest.raises(ZeroDivisionError):
        cascade_argmin(range(4000), scores["cheap"], scores["exact"])
    assert len(asked) < 400


def test_equal_scores_share_their_mean_rank():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert spearman([1, 2, math.inf], [1, 2, 3]) == pytest.approx(1.0)
    assert spearman([], []) is None and spearman([1], [2]) is None and spearman([1, 1], [1, 2]) is None


@pytest.mark.parametrize(
    ("candidates", "settings", "words"),
    [
        ((), {}, "no candidates"),
        ((1, 2, 3), {"probe_size": 1}, "probe_size must be 2 or more, got 1"),
        ((1, 2, 3), {"reduction": 0.5}, "reduction must be 1 or more and finite, got 0.5"),
        ((1, 2, 3), {"reduction": math.nan}, "reduction must be"),
    ],
)
def test_what_is_no_choice_is_refused_before_anything_is_scored(candidates, settings, words):
    def fail(_: int) -> float:
        raise AssertionError

    with pytest.raises(SettingsError, match=words):
        cascade_argmin(candidates, fail, fail, **settings)


@pytest.mark.parametrize("name", ["cheap", "exact"])
def test_a_score_that_is_no_number_is_named_with_its_candidate(name):
    scores = {"cheap": float, "exact": float} | {name: lambda x: math.nan if x == 2 else float(x)}
    with pytest.raises(ScoreError, match=f"the {name} score of candidate 2 is not a number"):
        cascade_argmin([0, 1, 2, 3], scores["cheap"], scores["exact"], probe_size=4)
