"""Chances that candidates are accepted: by their writers, the probability that the writer gives, and depth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from card.drafting.drafter_pass import Calibration
from card.engine.offers import DRAFTER_BIT
from card.engine.policy.cost import DISCOUNT
from card.engine.request import Verified
from card.tree.nodes import ROOT, Nodes

# Assumed chance that the draft model's next token is the target's, before any was seen. Too high a value costs a few
# rounds of drafting; too low a value prevents all drafting. Evidence: 0.7 and 0.75 are alike on the gate.
FIRST_AGREEMENT = 0.7
# Weight of the first agreement, in observations, among all that a pair showed. Evidence: where nothing lasts, an
# adversarial draft model costs 1.5 % more at 90 M, as useless drafting rounds follow each trial.
LASTING_COUNT = 30.0
# Weight of a prior, in observations: a writer's own probability, the first guess of an agreement, a predicted speed of
# a schedule. Evidence: 8 and 10 are alike on the gate, for each of them.
PRIOR_COUNT = 10.0
# Share of a pair's evidence of earlier texts that is kept when new texts replace the batch. Evidence: 0.5 to 0.85 are
# alike on the gate; with 0 a drafter that claims wrongly costs two percent more.
TEXT_KEPT = 0.7
# Depth up to which predictions distinguish layers. Evidence: 8 and 12 are alike on the gate.
DEEPEST = 12

_BOUNDS = tuple(-math.log1p(math.exp(3.5 - i)) for i in range(8))  # path scores between bins: one apart in log-odds


class Chances:
    """The share of candidates of one kind that the target accepts, by bins of path probability and of depth.

    Bins are even in log-odds; depths are 1, 2-3, 4-7 and from 8 on. With little evidence the path probability itself
    is the estimate. An unused bin fades too, so a bin that looked too bad to verify is tried again later.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._bins: dict[tuple[int, int], tuple[float, float, int]] = {}  # count, accepted, time of the last update

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
        """Reduce the weight of past observations."""
        self._bins = {bin_: (kept * count, kept * yes, at) for bin_, (count, yes, at) in self._bins.items()}

    def _faded(self, bin_: tuple[int, int]) -> tuple[float, float]:
        count, accepted, seen_at = self._bins.get(bin_, (0.0, 0.0, self._num_seen))
        weight = DISCOUNT ** ((self._num_seen - seen_at) / (1 + len(self._bins)))  # the bins share the observations
        return weight * count, weight * accepted

    @staticmethod
    def _bin(depth: int, path_logprob: float) -> tuple[int, int]:
        return min(depth.bit_length(), 4), bisect_left(_BOUNDS, path_logprob)


@dataclass(slots=True)
class _Claims:
    """Candidates that the draft model claimed to be about equally likely, and how many agreed; fading.

    The first few count as if what was claimed had been true.
    """

    first: float  # claim of these
    agreed: float = 0.0
    claimed: float = 0.0
    compared: float = 0.0

    @property
    def mean(self) -> tuple[float, float]:
        """The mean claim, and the share that agreed."""
        count, prior = self.compared + PRIOR_COUNT, PRIOR_COUNT * self.first
        return (self.claimed + prior) / count, (self.agreed + prior) / count

    def fade(self, kept: float) -> None:
        """Reduce the weight of past observations."""
        self.agreed *= kept
        self.claimed *= kept
        self.compared *= kept


class Agreement:
    """Share of the draft model's tokens that are the target's, and what the draft model's own claims are worth.

    Evidence of these texts fades towards the lasting evidence of the pair. The lasting evidence begins with a first
    guess, and fades only as more is seen: rounds without drafting and new texts say nothing about the pair.
    """

    def __init__(self, *, lasts: bool = True) -> None:
        """Begin with the first guess.

        Args:
            lasts: False: evidence fades towards the first guess instead.
        """
        self._lasts = lasts
        self._unsure, self._sure = _Claims(0.25), _Claims(0.75)  # claims below one half, and others
        self._lasting = [FIRST_AGREEMENT * LASTING_COUNT, LASTING_COUNT]  # agreed, compared
        self.num_compared = 0

    def recall(self, agreement: float) -> None:
        """Start from this share as the lasting evidence of the pair: so many of its tokens were compared before."""
        self._lasting = [agreement * LASTING_COUNT, LASTING_COUNT]
        self.num_compared = round(LASTING_COUNT)

    @property
    def lasting(self) -> float:
        """Share by the lasting evidence."""
        agreed, compared = self._lasting
        return agreed / compared

    @property
    def value(self) -> float:
        """Chance in [0, 1] that the draft model's candidate below an accepted one is accepted."""
        agreed, compared = self._unsure.agreed + self._sure.agreed, self._unsure.compared + self._sure.compared
        return (agreed + self.lasting * PRIOR_COUNT) / (compared + PRIOR_COUNT)

    @property
    def hoped(self) -> float:
        """The chance plus its standard error, by all that the pair ever showed: so a new pair is tried long enough."""
        chance = self.value
        return min(1.0, chance + math.sqrt(chance * (1 - chance) / (self.num_compared + PRIOR_COUNT)))

    @property
    def calibration(self) -> Calibration:
        """The line, of logarithms, through what was claimed and what agreed where claims are low and where high."""
        (low, low_agreed), (high, high_agreed) = self._unsure.mean, self._sure.mean
        slope = min(1.0, max(0.0, math.log(high_agreed / low_agreed) / math.log(high / low)))
        unsure, sure = self._unsure, self._sure
        count, prior = unsure.compared + sure.compared + PRIOR_COUNT, self.lasting * PRIOR_COUNT
        mean, agreed = (unsure.claimed + sure.claimed + prior) / count, (unsure.agreed + sure.agreed + prior) / count
        return Calibration(agreed / max(mean, 1e-9) ** slope, slope)

    def observe(self, num_agreed: int, claims: Sequence[float]) -> None:
        """Count candidates that were compared with the target's tokens: so many agreed, and at most one did not.

        Args:
            claims: probability of each by the draft model.
        """
        for idx, claim in enumerate(claims):
            kind = self._unsure if claim < 0.5 else self._sure
            kind.agreed += idx < num_agreed
            kind.claimed += claim
            kind.compared += 1
        num_compared = len(claims)
        self.num_compared += num_compared
        if self._lasts:
            weight = DISCOUNT**num_compared
            agreed, compared = self._lasting
            self._lasting = [weight * agreed + num_agreed, weight * compared + num_compared]

    def fade(self, kept: float) -> None:
        """Reduce the weight of past observations."""
        self._unsure.fade(kept)
        self._sure.fade(kept)


class Acceptance:
    """Estimates of each candidate's chance to be accepted.

    A candidate of the draft model alone is as likely as `calibration` makes of what the model says. Candidates of other
    writers, shared ones included, are calibrated by their set of writers.
    """

    def __init__(self, *, lasts: bool = True) -> None:
        """Start without evidence; ``lasts`` as in `Agreement`."""
        self._chances: defaultdict[tuple[bool, int], Chances] = defaultdict(Chances)  # by is_greedy and writers
        self.pair = Agreement(lasts=lasts)
        self._texts: frozenset[int] = frozenset()

    def probabilities(self, offer: Nodes, *, is_greedy: bool) -> list[float]:
        """Return the chance of each candidate to be accepted, in [0, 1].

        At most one sibling is accepted: together they are never likelier than their parent. Each writer is calibrated
        separately, so sums can exceed that. The likeliest sibling keeps its chance; each other one gets at most what
        the likelier ones leave.
        """
        calibration = self.pair.calibration
        all_writers = offer.writers or (DRAFTER_BIT,) * len(offer)
        probs = [
            calibration.chance(depth, logprob)
            if writers == DRAFTER_BIT
            else self._chances[is_greedy, writers].probability(depth, logprob)
            for writers, depth, logprob in zip(all_writers, offer.depths, offer.path_logprobs, strict=True)
        ]
        children: defaultdict[int, list[int]] = defaultdict(list)
        for idx, parent in enumerate(offer.parents):
            children[parent].append(idx)
        for parent, siblings in children.items():  # parents come before children, so the parent's chance is final
            left = 1.0 if parent == ROOT else probs[parent]
            if len(siblings) > 1:
                siblings.sort(key=lambda idx: -probs[idx])
            for idx in siblings:
                probs[idx] = min(probs[idx], left)
                left -= probs[idx]
        return probs

    def begin(self, text_ids: Iterable[int]) -> bool:
        """Fade old texts, the more the fewer of these were in the last round. Returns: whether there is a new one.

        What other writers had right in a text says nothing about the next one: of them only these texts count.
        """
        texts = frozenset(text_ids)
        new, self._texts = texts - self._texts, texts
        share = len(new) / max(1, len(texts))
        self.pair.fade(1 - (1 - TEXT_KEPT) * share)
        for chances in self._chances.values() if new else ():
            chances.fade(1 - share)
        return bool(new)

    def observe(self, verified: Sequence[Verified]) -> None:
        """Learn from the verifications of a round."""
        self.pair.fade(DISCOUNT)
        for one in verified:
            if one.claims:
                self.pair.observe(one.num_agreed, one.claims)
            if one.offer.writers:
                self._observe_offer(one)

    def _observe_offer(self, one: Verified) -> None:
        offer, on_path = one.offer, set(one.accepted)
        for idx, (writers, depth, logprob) in enumerate(
            zip(offer.writers, offer.depths, offer.path_logprobs, strict=True)
        ):
            if writers != DRAFTER_BIT:
                self._chances[one.is_greedy, writers].observe(depth, logprob, idx in on_path)
