"""The cascade: it keeps what the cheap score cannot judge, counts its calls, and refuses what is no choice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.cascade import cascade_argmin, spearman
from card.errors import ScoreError, SettingsError

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
