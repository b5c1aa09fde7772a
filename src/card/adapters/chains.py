"""Which chain to hand over: the candidates' calibrated chances against what a row of the engine's pass costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from card.policy import acceptance
from card.tree.nodes import ROOT, Nodes
from card.workers.offers import DRAFTER_BIT

_DISCOUNT = 0.98  # of all earlier steps, per step
_OUTLIER_FACTOR = 4.0  # a step that takes so many times the mean was disturbed, and is left out
_MIN_STEPS = 6.0  # measured steps before the prior is corrected
_PRIOR_SLOPE = 0.05  # share of a step's time by which doubling its rows lengthens it, as long as nothing is measured
_PRIOR_WEIGHT = 4.0  # steps that the prior slope counts for
_MIN_COST, _MAX_COST = 0.01, 0.9
_FIRST_COST = 0.05  # of a row before any step was timed, in tokens


class Chances:
    """How likely candidates are to be accepted: by who proposes them, by depth and by what that writer thinks.

    Greedy and sampled requests count together, as an engine does not say which is which.
    """

    def __init__(self) -> None:
        self._of: dict[int, acceptance.Chances] = {}

    def of(self, offer: Nodes) -> list[float]:
        """Return the chance of each candidate, in [0, 1], and never above its parent's."""
        chances: list[float] = []
        rows = zip(offer.writers, offer.parents, offer.depths, offer.path_logprobs, strict=True)
        for writers, parent, depth, path_logprob in rows:
            known = self._of.get(writers)
            chance = math.exp(path_logprob) if known is None else known.probability(depth, path_logprob)
            chances.append(chance if parent == ROOT else min(chance, chances[parent]))
        return chances

    def reached(self, path: Nodes) -> tuple[int, float]:
        """Return the depth of a path of the draft model's, and the chance that it is accepted to its end."""
        if not path:
            return 0, 1.0
        known = self._of.get(DRAFTER_BIT)
        depth, logprob = path.depths[-1], path.path_logprobs[-1]
        return depth, math.exp(logprob) if known is None else known.probability(depth, logprob)

    def observe(self, chain: Nodes, num_accepted: int) -> None:
        """Take what became of a chain, of which the first ``num_accepted`` were right."""
        rows = enumerate(zip(chain.writers, chain.depths, chain.path_logprobs, strict=True))
        for idx, (writers, depth, path_logprob) in rows:
            known = self._of.get(writers)
            if known is None:
                known = self._of[writers] = acceptance.Chances()
            known.observe(depth, path_logprob, idx < num_accepted)


def best_chain(offer: Nodes, chances: Sequence[float], row_cost: float, most: int) -> list[int]:
    """Return the indices of the chain that is worth most, from the root down; empty if none is worth its rows.

    A candidate is worth its chance of acceptance minus what its row costs.

    Args:
        offer: a tree, parents before children.
        chances: of each candidate to be accepted, in [0, 1].
        row_cost: tokens that a row must bring.
        most: most candidates.
    """
    values = [chance - row_cost for chance in chances]
    best_below: list[tuple[float, int]] = [(0.0, ROOT)] * len(offer)  # value of the best chain below, its first node
    best = (0.0, ROOT)
    for idx in range(len(offer) - 1, -1, -1):
        if offer.depths[idx] > most:
            continue
        value = values[idx] + best_below[idx][0]
        parent = offer.parents[idx]
        if parent == ROOT:
            best = max(best, (value, idx))
        elif value > best_below[parent][0]:
            best_below[parent] = (value, idx)
    chain: list[int] = []
    node = best[1]
    while node != ROOT:
        chain.append(node)
        node = best_below[node][1]
    return chain


@dataclass(slots=True)
class _Sums:
    """Fading sums over the steps of about so many requests: rows x, seconds y, tokens."""

    num: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    tokens: float = 0.0

    def add(self, rows: float, seconds: float, tokens: float) -> None:
        self.num = self.num * _DISCOUNT + 1.0
        self.x = self.x * _DISCOUNT + rows
        self.y = self.y * _DISCOUNT + seconds
        self.xx = self.xx * _DISCOUNT + rows * rows
        self.xy = self.xy * _DISCOUNT + rows * seconds
        self.tokens = self.tokens * _DISCOUNT + tokens


class RowCosts:
    """Learns what a row costs from how long the engine's steps take.

    The seconds of a step are fitted by a line over its rows, apart for 1, 2-3, 4-7, 8-15, ... requests. Seconds become
    tokens by the rate at which the engine commits tokens then: at the optimum a row is worth what its seconds bring
    elsewhere (Dinkelbach 1967, On nonlinear fractional programming).
    """

    def __init__(self, fixed: float | None = None) -> None:
        """Begin with a prior; ``fixed`` is a cost in tokens that stays."""
        self._fixed = fixed
        self._sums: dict[int, _Sums] = {}

    def observe(self, num_requests: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take in one step.

        Args:
            num_requests: that committed a token in it; no other may have run.
            num_rows: one for each of them, and the candidates.
            num_tokens: that were committed.
            seconds: from the handing over of the candidates to the tokens.
        """
        sums = self._sums.setdefault(num_requests.bit_length(), _Sums())
        if sums.num >= _MIN_STEPS and seconds > _OUTLIER_FACTOR * sums.y / sums.num:
            return
        sums.add(num_rows, seconds, num_tokens)

    def rate(self, num_requests: int) -> float | None:
        """Return the tokens per second of steps of so many requests; None if too few were timed."""
        sums = self._sums.get(num_requests.bit_length())
        return None if sums is None or sums.num < _MIN_STEPS or sums.y <= 0.0 else sums.tokens / sums.y

    def cost(self, num_requests: int) -> float:
        """Return the tokens that a row must bring in a step of so many requests, in [0, 1]."""
        if self._fixed is not None:
            return self._fixed
        sums = self._sums.get(num_requests.bit_length())
        if sums is None or sums.num < _MIN_STEPS or sums.y <= 0.0:
            return _FIRST_COST
        mean_x, mean_y = sums.x / sums.num, sums.y / sums.num
        prior = _PRIOR_SLOPE * mean_y / mean_x
        prior_xx = _PRIOR_WEIGHT * (mean_x / 2.0) ** 2
        variation = max(0.0, sums.xx - sums.num * mean_x * mean_x)
        covariation = sums.xy - sums.num * mean_x * mean_y
        slope = (covariation + prior_xx * prior) / (variation + prior_xx)
        cost = slope * sums.tokens / sums.y
        return min(_MAX_COST, max(_MIN_COST, cost)) if math.isfinite(cost) else _FIRST_COST
