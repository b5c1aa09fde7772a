"""Chances of candidates to be accepted: by who proposed them, how likely that writer thinks them, and by depth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from card.engine.offers import DRAFTER_BIT
from card.engine.policy.cost import DISCOUNT
from card.engine.request import Verified
from card.tree.nodes import ROOT, Nodes

# Chance that the draft model's next token is the target's, until it has been seen. Too high a value costs a few rounds
# of drafting, too low a one all of it. Evidence: 0.7 and 0.75 are alike on the gate.
FIRST_AGREEMENT = 0.7
# Observations that the first agreement counts for among all that a pair showed. Evidence: where nothing lasts, an
# adversarial draft model costs 1.5 % more at 90 M, as each trial is followed by rounds that draft in vain.
LASTING_COUNT = 30.0
# Observations that a prior counts for: a writer's own probability, the first guess of an agreement, a prediction of
# what a schedule brings. Evidence: 8 and 10 are alike on the gate, for each of them.
PRIOR_COUNT = 10.0
# Share of what earlier texts showed that is kept when new ones take over the batch. Evidence: 0.5 to 0.85 are alike on
# the gate.
TEXT_KEPT = 0.7
# Deepest candidates that predictions tell apart, in layers. Evidence: 8 and 12 are alike on the gate.
DEEPEST = 12

_BOUNDS = tuple(-math.log1p(math.exp(3.5 - i)) for i in range(8))  # path scores between bins: one apart in log-odds


class Chances:
    """The share of candidates of one kind that the target accepts, by bins of path probability and of depth.

    Bins are even in log-odds, depths are 1, 2-3, 4-7 and from 8 on. Where little was seen the path probability itself
    is the estimate. An idle bin fades, too: one that looked too bad to verify from is tried again some day.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._bins: dict[tuple[int, int], tuple[float, float, int]] = {}  # count, accepted, when brought up to date

    def observe(self, depth: int, path_logprob: float, was_accepted: bool) -> None:
        """Count one verified candidate.

        Args:
            depth: below the root, whose children have depth 1.
            path_logprob: its path score as its writer gave it, at most 0 up to rounding.
            was_accepted: whether it lies on the accepted path.
        """
        self._num_seen += 1
        bin_ = self._bin(depth, path_logprob)
        count, accepted = self._faded(bin_)
        self._bins[bin_] = DISCOUNT * count + 1, DISCOUNT * accepted + was_accepted, self._num_seen

    def probability(self, depth: int, path_logprob: float) -> float:
        """Return the chance that such a candidate is accepted, in [0, 1]; arguments as for `observe`."""
        count, accepted = self._faded(self._bin(depth, path_logprob))
        return (accepted + PRIOR_COUNT * math.exp(min(path_logprob, 0.0))) / (count + PRIOR_COUNT)

    def fade(self, kept: float) -> None:
        """Let what was seen count for less."""
        self._bins = {bin_: (kept * count, kept * yes, at) for bin_, (count, yes, at) in self._bins.items()}

    def _faded(self, bin_: tuple[int, int]) -> tuple[float, float]:
        count, accepted, seen_at = self._bins.get(bin_, (0.0, 0.0, self._num_seen))
        kept = DISCOUNT ** ((self._num_seen - seen_at) / (1 + len(self._bins)))  # slower: others got these observations
        return kept * count, kept * accepted

    @staticmethod
    def _bin(depth: int, path_logprob: float) -> tuple[int, int]:
        return min(depth.bit_length(), 4), bisect_left(_BOUNDS, path_logprob)


class Agreement:
    """Share of the draft model's tokens that are the target's, and how far that is from what the draft model claims.

    What was seen of these texts fades back to what the pair showed all along. That in turn begins with a first guess,
    and is forgotten only as more is seen: rounds without drafting and new texts teach nothing about the pair.
    """

    def __init__(self, *, lasts: bool = True) -> None:
        """Begin with the first guess.

        Args:
            lasts: False fades back to the first guess, whatever was seen.
        """
        self._lasts = lasts
        self._agreed = self._claimed = self._compared = 0.0
        self.num_compared = 0
        self.recall(FIRST_AGREEMENT)

    def recall(self, agreement: float) -> None:
        """Take this as what the pair showed all along."""
        self._lasting = [agreement * LASTING_COUNT, LASTING_COUNT]  # agreed, compared

    @property
    def lasting(self) -> float:
        """Share that the pair showed all along."""
        agreed, compared = self._lasting
        return agreed / compared

    @property
    def value(self) -> float:
        """Chance in [0, 1] that the draft model's candidate below an accepted one is accepted."""
        return (self._agreed + self.lasting * PRIOR_COUNT) / (self._compared + PRIOR_COUNT)

    @property
    def trust(self) -> float:
        """Chance of a path to be accepted over what its score says, by layer; 1 of an honest draft model."""
        prior = self.lasting * PRIOR_COUNT
        return max(self._agreed + prior, 1e-9) / max(self._claimed + prior, 1e-9)

    def observe(self, num_agreed: int, num_compared: int, num_claimed: float) -> None:
        """Count candidates that the target's tokens were compared with, and how many of them should have agreed."""
        self._agreed += num_agreed
        self._claimed += num_claimed
        self._compared += num_compared
        self.num_compared += num_compared
        if self._lasts:
            kept = DISCOUNT**num_compared
            agreed, compared = self._lasting
            self._lasting = [kept * agreed + num_agreed, kept * compared + num_compared]

    def fade(self, kept: float) -> None:
        """Let what was seen count for less."""
        self._agreed *= kept
        self._claimed *= kept
        self._compared *= kept


class Acceptance:
    """Estimates for the text: the chance of each candidate.

    Candidates of the draft model alone are as likely as it says, times its `trust` for each layer. Those that other
    writers propose as well or instead are calibrated by who proposes them.
    """

    def __init__(self, *, lasts: bool = True) -> None:
        """Start without knowledge; ``lasts`` as of `Agreement`."""
        self._chances: defaultdict[tuple[bool, int], Chances] = defaultdict(Chances)  # by is_greedy and writers
        self.pair = Agreement(lasts=lasts)
        self._texts: frozenset[int] = frozenset()

    @property
    def agreement(self) -> float:
        """Chance in [0, 1] that the draft model's candidate below an accepted one is accepted."""
        return self.pair.value

    @property
    def trust(self) -> float:
        """As of `Agreement`."""
        return self.pair.trust

    def chance(self, depth: int, path_logprob: float) -> float:
        """Return the chance that a path of the draft model's is accepted to its end, which may be the root."""
        return _trusted(depth, path_logprob, self.trust)

    def probabilities(self, offer: Nodes, *, is_greedy: bool) -> list[float]:
        """Return the chance of each candidate to be accepted, in [0, 1].

        Of siblings one at most is accepted: together they are never likelier than their parent. Each writer is
        calibrated apart and knows nothing of that, so the likeliest sibling keeps its chance and each other one gets
        at most what the likelier ones leave.
        """
        trust = self.trust
        all_writers = offer.writers or (DRAFTER_BIT,) * len(offer)
        probs = [
            _trusted(depth, logprob, trust)
            if writers == DRAFTER_BIT
            else self._chances[is_greedy, writers].probability(depth, logprob)
            for writers, depth, logprob in zip(all_writers, offer.depths, offer.path_logprobs, strict=True)
        ]
        children: defaultdict[int, list[int]] = defaultdict(list)
        for idx, parent in enumerate(offer.parents):
            children[parent].append(idx)
        for parent, siblings in children.items():  # parents come before children, so the parent's is settled
            left = 1.0 if parent == ROOT else probs[parent]
            if len(siblings) > 1:
                siblings.sort(key=lambda idx: -probs[idx])
            for idx in siblings:
                probs[idx] = min(probs[idx], left)
                left -= probs[idx]
        return probs

    def begin(self, text_ids: Iterable[int]) -> float:
        """Let old texts count for less, the more of these are not of the last round. Returns: the share kept."""
        texts = frozenset(text_ids)
        new, self._texts = texts - self._texts, texts
        kept = 1 - (1 - TEXT_KEPT) * len(new) / len(texts) if new else 1.0
        if new:
            self.pair.fade(kept)
            for chances in self._chances.values():
                chances.fade(kept)
        return kept

    def observe(self, verified: Sequence[Verified]) -> None:
        """Learn from the verifications of a round."""
        self.pair.fade(DISCOUNT)
        for one in verified:
            if one.num_compared:
                self.pair.observe(one.num_agreed, one.num_compared, one.num_claimed)
            if one.offer.writers:
                self._observe_offer(one)

    def _observe_offer(self, one: Verified) -> None:
        offer, on_path = one.offer, set(one.accepted)
        for idx, (writers, depth, logprob) in enumerate(
            zip(offer.writers, offer.depths, offer.path_logprobs, strict=True)
        ):
            if writers != DRAFTER_BIT:
                self._chances[one.is_greedy, writers].observe(depth, logprob, idx in on_path)


def _trusted(depth: int, path_logprob: float, trust: float) -> float:
    """Return the chance of a path of the draft model's."""
    return min(1.0, math.exp(min(path_logprob, 0.0)) * trust**depth)
