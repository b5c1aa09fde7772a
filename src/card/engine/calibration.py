"""How often the target accepts what the drafter thinks so likely: by path probability and depth, learnt online."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from card.tree.nodes import Candidates
from card.tree.verify import ROOT
from card.workers.offers import AND_OTHERS, DRAFTER

# Finer near 1, where most of what is verified lies and where a small difference decides about a long chain.
_BIN_STARTS = tuple(map(math.log, (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)))
_NUM_BINS = len(_BIN_STARTS) + 1
_FIRST_DEPTHS = (1, 2, 3, 5, 9)  # of the depth buckets; the last has no end
_BUCKET_OF_DEPTH = tuple(bisect_right(_FIRST_DEPTHS, max(depth, 1)) - 1 for depth in range(_FIRST_DEPTHS[-1]))
_LAST_BUCKET = len(_FIRST_DEPTHS) - 1

_KEPT = 1.0 - 1.0 / 300.0  # of a bin's counts when it gets another: it remembers about 300 observations
_PRIOR_COUNT = 10.0  # observations that the candidate's own path probability counts for
_FADING = math.log(2.0) / 5000.0  # per observation in any bin: a bin that gets none halves its counts in 5000
_BRANCH_PRIOR_COUNT = 10.0
_ANY_OF_DRAFTER = ""  # the label of all that the drafter proposes


@dataclass(frozen=True, slots=True)
class DepthReport:
    """What was verified at some depths below the root, over the calibration's whole life."""

    first_depth: int
    last_depth: int | None  # None: and all deeper ones
    count: int  # candidates verified
    predicted_mean: float  # of their path probabilities as the drafter gave them, in [0, 1]; 0 without candidates
    accepted_share: float  # in [0, 1]; 0 without candidates


class Calibration:
    """Turns a drafter's path probability into the share of such candidates that the target accepts.

    A candidate is accepted if it lies on the accepted path. Shares are counted in bins of path probability, apart for
    depths 1, 2, 3-4, 5-8 and 9 on; where little was seen the path probability itself is the estimate. Counts fade with
    every observation, slowly in idle bins too: a bin that looked too bad to verify from is tried again some day.

    One object serves candidates of one kind: greedy and sampled text, or different drafters, need their own.
    """

    def __init__(self) -> None:
        num_bins = _NUM_BINS * len(_FIRST_DEPTHS)
        self._num_observed = 0
        self._counts = [0.0] * num_bins
        self._accepted = [0.0] * num_bins
        self._seen_at = [0] * num_bins  # _num_observed when the counts of the bin were last brought up to date
        self._branches = [_Share() for _ in _FIRST_DEPTHS]
        self._total_counts = [0] * len(_FIRST_DEPTHS)
        self._total_accepted = [0] * len(_FIRST_DEPTHS)
        self._total_predicted = [0.0] * len(_FIRST_DEPTHS)

    def observe(self, depth: int, path_logprob: float, was_accepted: bool) -> None:
        """Count one verified candidate.

        Args:
            depth: below the root, whose children have depth 1.
            path_logprob: its path score as the drafter gave it, at most 0 up to rounding.
            was_accepted: whether it lies on the accepted path.
        """
        bucket = _BUCKET_OF_DEPTH[depth] if depth < _FIRST_DEPTHS[-1] else _LAST_BUCKET
        idx = bucket * _NUM_BINS + bisect_right(_BIN_STARTS, path_logprob)
        self._num_observed += 1
        kept = _KEPT * math.exp(_FADING * (self._seen_at[idx] - self._num_observed))
        self._seen_at[idx] = self._num_observed
        self._counts[idx] = self._counts[idx] * kept + 1.0
        self._accepted[idx] = self._accepted[idx] * kept + was_accepted
        self._total_counts[bucket] += 1
        self._total_accepted[bucket] += was_accepted
        self._total_predicted[bucket] += math.exp(min(path_logprob, 0.0))

    def observe_branches(self, candidates: Candidates, accepted: Sequence[int]) -> None:
        """Count how far the target followed the candidates of one verification; arguments as for `observe_tree`."""
        parents = set(candidates.parents)
        for depth, idx in enumerate((ROOT, *accepted)):
            if idx in parents:  # had it none, nothing could have followed
                self._branches[self._bucket(depth + 1)].observe(depth < len(accepted))

    def observe_tree(self, candidates: Candidates, accepted: Sequence[int]) -> None:
        """Count all candidates of one verification, and how far the target followed them.

        Args:
            candidates: all that were verified.
            accepted: indices of the accepted path into them, from the root down.
        """
        on_path = set(accepted)
        for idx, (depth, path_logprob) in enumerate(zip(candidates.depths, candidates.path_logprobs, strict=True)):
            self.observe(depth, path_logprob, idx in on_path)
        self.observe_branches(candidates, accepted)

    def probability(self, depth: int, path_logprob: float) -> float:
        """Return the chance that such a candidate is accepted, in [0, 1]; arguments as for `observe`.

        Neighbouring bins are estimated apart: a likelier path may get the lower estimate.
        """
        bucket = _BUCKET_OF_DEPTH[depth] if depth < _FIRST_DEPTHS[-1] else _LAST_BUCKET
        idx = bucket * _NUM_BINS + bisect_right(_BIN_STARTS, path_logprob)
        own = math.exp(path_logprob) if path_logprob < 0.0 else 1.0
        if not self._counts[idx]:
            return own
        kept = math.exp(_FADING * (self._seen_at[idx] - self._num_observed))
        return (self._accepted[idx] * kept + _PRIOR_COUNT * own) / (self._counts[idx] * kept + _PRIOR_COUNT)

    def next_probability(self, depth: int, path_logprob: float) -> float:
        """Return the chance that a node is accepted and then one of the children that it does not have yet.

        It is the node's own chance times the share of accepted nodes, one layer above the children, of which a verified
        child was accepted; this share is learnt by `observe_tree` and begins at three quarters.

        Args:
            depth: of the node; 0 for the root, which is accepted always.
            path_logprob: the node's path score.
        """
        own = self.probability(depth, path_logprob) if depth else 1.0
        everywhere = (sum(branch.taken for branch in self._branches) + 3.0) / (
            sum(branch.count for branch in self._branches) + 4.0
        )
        here = self._branches[self._bucket(depth + 1)]
        return own * (here.taken + _BRANCH_PRIOR_COUNT * everywhere) / (here.count + _BRANCH_PRIOR_COUNT)

    def report(self) -> tuple[DepthReport, ...]:
        """Return one entry per depth bucket, shallow ones first."""
        last_depths = (*(first - 1 for first in _FIRST_DEPTHS[1:]), None)
        reports = []
        for first, last, count, predicted, accepted in zip(
            _FIRST_DEPTHS, last_depths, self._total_counts, self._total_predicted, self._total_accepted, strict=True
        ):
            reports.append(DepthReport(first, last, count, predicted / max(count, 1), accepted / max(count, 1)))
        return tuple(reports)

    @staticmethod
    def _bucket(depth: int) -> int:
        return _BUCKET_OF_DEPTH[depth] if depth < _FIRST_DEPTHS[-1] else _LAST_BUCKET


class Calibrations:
    """A calibration for each kind of candidate: by who proposed it, and for greedy and sampled text apart.

    The drafter's own counts all its candidates, whoever else proposed them: it tells what a path will be worth before
    the others were asked.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[bool, str], Calibration] = {}

    def of(self, is_greedy: bool, writers: str = _ANY_OF_DRAFTER) -> Calibration:
        """Return the calibration of candidates that these writers propose, named as in `Candidates.writers`."""
        found = self._of.get((is_greedy, writers))
        if found is None:
            found = self._of[is_greedy, writers] = Calibration()
        return found

    def observe(self, is_greedy: bool, candidates: Candidates, accepted: Sequence[int]) -> None:
        """Count the candidates of one verification; arguments as for `Calibration.observe_tree`."""
        drafter = self.of(is_greedy)
        if not candidates.writers:
            drafter.observe_tree(candidates, accepted)
            return
        on_path = set(accepted)
        rows = zip(candidates.writers, candidates.depths, candidates.path_logprobs, strict=True)
        for idx, (writers, depth, path_logprob) in enumerate(rows):
            self.of(is_greedy, writers).observe(depth, path_logprob, idx in on_path)
            if writers == DRAFTER or writers.startswith(AND_OTHERS):
                drafter.observe(depth, path_logprob, idx in on_path)
        drafter.observe_branches(candidates, accepted)

    def probabilities(self, is_greedy: bool, candidates: Candidates) -> list[float]:
        """Return the chance of each candidate to be accepted, in [0, 1].

        Of siblings one at most is accepted: together they are never likelier than their parent. Each writer is
        calibrated apart and knows nothing of that, so the likeliest sibling keeps its chance and each other one gets
        at most what the likelier ones leave.
        """
        names = candidates.writers or (_ANY_OF_DRAFTER,) * len(candidates)
        rows = zip(names, candidates.depths, candidates.path_logprobs, strict=True)
        probs = [self.of(is_greedy, writers).probability(depth, logprob) for writers, depth, logprob in rows]
        children: dict[int, list[int]] = {}
        for idx, parent in enumerate(candidates.parents):
            children.setdefault(parent, []).append(idx)
        for parent, siblings in children.items():  # parents come before children, so the parent's is settled
            left = 1.0 if parent == ROOT else probs[parent]
            if len(siblings) > 1:
                siblings.sort(key=lambda idx: -probs[idx])
            for idx in siblings:
                probs[idx] = min(probs[idx], left)
                left -= probs[idx]
        return probs


class _Share:
    """Fading counts of how often something happened when it could."""

    __slots__ = ("count", "taken")

    def __init__(self) -> None:
        self.count = 0.0
        self.taken = 0.0

    def observe(self, was_taken: bool) -> None:
        self.count = self.count * _KEPT + 1.0
        self.taken = self.taken * _KEPT + was_taken
