"""Find the best of many candidates by an expensive score, after a cheap score has ruled out most of them.

Source: the filter of probe sampling (arXiv:2403.01251). It is lossy: the best candidate may be ruled out. The returned
score is always the exact one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Generic, TypeVar

import numpy as np

from card.errors import ScoreError, SettingsError

T = TypeVar("T")
LEAST_PROBE = 2  # ranks of a single candidate agree with anything
_PROBE_SHARE = 8  # the probe is one candidate in eight


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeChoice(Generic[T]):
    """The chosen candidate, and the number of scores that it took."""

    best: T
    best_idx: int  # index among the candidates
    exact_scores: Mapping[int, float]  # by index, of each candidate that was scored exactly
    probe: tuple[int, ...]  # indices of the candidates that both scores rated first
    correlation: float | None  # Spearman's, on the probe; None: undefined, and all candidates were kept
    num_kept: int  # candidates with the lowest cheap scores that were kept for the exact one
    num_cheap: int  # calls of the cheap score
    num_exact: int  # calls of the exact score, without those that only measured the regret
    regret: float | None  # exact score of the choice minus that of the true best; None: not measured

    @property
    def best_score(self) -> float:
        """Exact score of the choice."""
        return self.exact_scores[self.best_idx]


def cascade_argmin(
    candidates: Sequence[T],
    cheap: Callable[[T], float],
    exact: Callable[[T], float],
    *,
    probe_size: int | None = None,
    reduction: float = 8.0,
    seed: int = 0,
    measures_regret: bool = False,
) -> CascadeChoice[T]:
    """Return the candidate with the lowest exact score, among those that the cheap score does not rule out.

    A random probe is scored both ways: exactly at the same time as all candidates are scored cheaply, so the two scores
    are called in two threads. The better both rankings agree there, the fewer candidates are kept: of B with
    rank correlation r, ceil((1 - r) / 2 * B / reduction), those with the lowest cheap scores, and one at least.

    Args:
        cheap, exact: scores of one candidate; lower is better, and inf never wins against a number.
        probe_size: candidates of the probe. None: an eighth of all, and two at least.
        reduction: divides what is kept; 1 or more. Smaller values keep more.
        seed: of the probe, which is drawn before anything is scored.
        measures_regret: score all others exactly, too, and report the loss.
    Raises: SettingsError for no candidates, a probe of fewer than two, or a reduction below 1; ScoreError for a score
        that is no number; whatever a score raises. No score is begun after one failed.
    Source: arXiv:2403.01251, with one change: an undefined correlation keeps all candidates.
    """
    size = _check(candidates, probe_size, reduction)
    scored = _Scores(candidates, exact, "exact")
    probe = tuple(sorted(random.Random(seed).sample(range(len(candidates)), size)))
    everything = range(len(candidates))
    cheap_scores = _score_both(_Scores(candidates, cheap, "cheap"), everything, scored, probe)
    correlation = spearman([cheap_scores[idx] for idx in probe], scored.of(probe).values())
    candidates_left = sorted(everything, key=cheap_scores.__getitem__)
    if correlation is not None:
        disagreement = (1.0 - correlation) / 2.0
        candidates_left = candidates_left[: max(1, math.ceil(disagreement * len(candidates) / reduction))]
    exact_scores = dict(scored.of([*probe, *candidates_left]))
    best_idx = min(exact_scores, key=lambda idx: (exact_scores[idx], idx))
    regret = _regret(exact_scores[best_idx], scored.of(everything).values()) if measures_regret else None
    return CascadeChoice(
        best=candidates[best_idx],
        best_idx=best_idx,
        exact_scores=exact_scores,
        probe=probe,
        correlation=correlation,
        num_kept=len(candidates_left),
        num_cheap=len(candidates),
        num_exact=len(exact_scores),
        regret=regret,
    )


def spearman(first: Iterable[float], second: Iterable[float]) -> float | None:
    """Return the rank correlation of two rows of scores, from -1 to 1; equal scores share their mean rank.

    Returns: None if it is undefined: fewer than two scores, or a row of equal ones.
    Source: Spearman 1904.
    """
    ranks = [_ranks(np.asarray(tuple(row), dtype=np.float64)) for row in (first, second)]
    centred = [row - row.mean() if row.size else row for row in ranks]
    size = math.sqrt(float(centred[0] @ centred[0]) * float(centred[1] @ centred[1]))
    return max(-1.0, min(1.0, float(centred[0] @ centred[1]) / size)) if size > 0.0 else None


def _ranks(scores: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray = (last - (counts - 1) / 2.0)[places]
    return ranks


def _check(candidates: Sequence[object], probe_size: int | None, reduction: float) -> int:
    """Return how many candidates the probe has. Raises: SettingsError."""
    if not candidates:
        raise SettingsError("there are no candidates to choose from; give one or more")
    if probe_size is not None and probe_size < LEAST_PROBE:
        raise SettingsError(
            f"probe_size must be {LEAST_PROBE} or more, got {probe_size}: rankings of fewer candidates cannot disagree"
        )
    if not 1.0 <= reduction < math.inf:
        raise SettingsError(f"reduction must be 1 or more and finite, got {reduction}")
    wanted = max(LEAST_PROBE, len(candidates) // _PROBE_SHARE) if probe_size is None else probe_size
    return min(wanted, len(candidates))


def _score_both(
    cheap: _Scores[T], everything: Iterable[int], exact: _Scores[T], probe: Iterable[int]
) -> dict[int, float]:
    """Score everything cheaply in a second thread while this one scores the probe exactly. Returns: the cheap scores.

    If one fails, neither begins another score.
    """
    failed = Event()
    with ThreadPoolExecutor(1) as pool:
        cheap_scores = pool.submit(cheap.of, everything, failed)
        exact.of(probe, failed)
        return cheap_scores.result()


def _regret(chosen: float, scores: Iterable[float]) -> float:
    best = min(scores)
    return 0.0 if chosen == best else chosen - best  # two infinite scores are equal


class _Scores(Generic[T]):
    """Scores of candidates by index, each computed once."""

    def __init__(self, candidates: Sequence[T], score: Callable[[T], float], name: str) -> None:
        self._candidates, self._score, self._name = candidates, score, name
        self._known: dict[int, float] = {}

    def of(self, places: Iterable[int], failed: Event | None = None) -> dict[int, float]:
        """Return the scores of these candidates, in their order.

        Args:
            failed: set by the first of several calls that fails; the others then end early.
        Raises: ScoreError for a score that is no number.
        """
        found: dict[int, float] = {}
        try:
            for idx in places:
                if failed is not None and failed.is_set():
                    break
                found[idx] = self._known[idx] if idx in self._known else self._ask(idx)
        except BaseException:
            if failed is not None:
                failed.set()
            raise
        return found

    def _ask(self, idx: int) -> float:
        score = float(self._score(self._candidates[idx]))
        if math.isnan(score):
            raise ScoreError(
                f"the {self._name} score of candidate {idx} is not a number; leave the candidate out, or score it inf"
            )
        self._known[idx] = score
        return score
