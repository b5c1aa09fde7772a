"""Judges that need no training: they compare the target's probabilities, some of them with the drafter's.

Each has one knob, its leniency. At 0 it tolerates nothing, so that the text is that of plain decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from card.family.judges.judge import Mismatch
from card.tree.logits import FloatArray, top
from card.tree.nodes import ROOT, SELF_BIT, Nodes
from card.tree.verify import Verification

_TYPICAL_MOST, _TYPICAL_SHARE = 0.09, 0.3  # epsilon and delta of Medusa's code
_NUM_RELAXED = 3  # a candidate must be among as many likeliest tokens of the target
_SURE = 0.9  # probability of the target's likeliest token above which the KL judge is strict
_LEAST_SHARE = 1e-9  # of the tokens that the drafter did not name: the rest of the probability
_NUM_UNSURE = 3  # likeliest tokens of the target in FLy's entropy
_WINDOW = 6  # tokens after a mismatch that FLy checks
_DRAFT_MODEL = 1  # bit of the draft model among the writers of a candidate


@dataclass(frozen=True, slots=True)
class Typical:
    """Tolerate a token that is likely given the entropy: ``knob`` * p(x) > min(epsilon, delta * exp(-entropy)).

    A knob of 1 is the published rule with the numbers of its code. Source: Cai et al. 2024 (Medusa), arXiv:2401.10774.
    """

    knob: float

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate is accepted."""
        least = min(_TYPICAL_MOST, _TYPICAL_SHARE * math.exp(-_entropy(mismatch.logprobs)))
        return self.knob * math.exp(mismatch.logprob) > least


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Tolerate one of the target's 3 likeliest tokens with more than 1 - ``knob`` of the likeliest one's probability.

    Source: relaxed acceptance of TensorRT-LLM, with a ratio instead of its difference; 0.5 is usual.
    """

    knob: float

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate is accepted."""
        likeliest = top(mismatch.logprobs[None], _NUM_RELAXED)[1][0]
        best, last = float(likeliest[0]), float(likeliest[-1])
        is_near = self.knob >= 1 or mismatch.logprob > best + math.log1p(-self.knob)
        return mismatch.logprob >= last and is_near


@dataclass(frozen=True, slots=True)
class Partial:
    """Tolerate every candidate that the target drafted for itself, unless ``knob`` is 0.

    So candidates that passed a verification over few KV rows are accepted, as in SpecPV. Source: arXiv:2512.02337.
    """

    knob: float

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate is accepted."""
        writers = mismatch.seen.offer.writers
        return self.knob > 0 and bool(writers) and bool(writers[mismatch.candidate] & SELF_BIT)


@dataclass(frozen=True, slots=True)
class KullbackLeibler:
    """Tolerate a candidate where target and drafter have similar distributions: KL(target || drafter) < ``knob`` nats.

    It is strict where the target is sure. Source: the training-free judge of arXiv:2601.04766. Ours: the drafter sends
    only the chances of candidates, so all other tokens count as one. That is a lower bound of the divergence.
    """

    knob: float

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate is accepted."""
        if float(mismatch.logprobs.max()) > math.log(_SURE):
            return False
        drafted = _drafted_logprobs(mismatch.seen.offer, mismatch.parent)
        if mismatch.seen.offer.tokens[mismatch.candidate] not in drafted:
            return False  # a writer without a model has no real probabilities
        target = {token: float(mismatch.logprobs[token]) for token in drafted}
        divergence = _divergence(list(target.values()), list(drafted.values()))
        return divergence < self.knob


@dataclass(frozen=True, slots=True)
class Fly:
    """Tolerate a mismatch where the target is unsure, if the next 6 candidates are its own choices again.

    The target is unsure if -sum p log p over its 3 likeliest tokens is at least 1 - ``knob`` nats. Their probabilities
    are not renormalised, so the sum is 1.1 at most. If the candidates end before the window, the mismatch is rejected.
    Source: FLy, arXiv:2511.22972 (entropy gate and deferred window), and its code; the gate there is 0.3 nats, a knob
    of 0.7.
    """

    knob: float

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate is accepted."""
        likeliest = top(mismatch.logprobs[None], _NUM_UNSURE)[1][0]
        is_open = self.knob > 0 and _entropy(likeliest) >= 1.0 - self.knob
        return is_open and _goes_on(mismatch.seen, mismatch.candidate, _WINDOW)


def _entropy(logprobs: FloatArray) -> float:
    """Return -sum p log p in nats of some log-probabilities; impossible tokens add nothing."""
    known = logprobs[logprobs > -np.inf]
    return -float((np.exp(known) * known).sum())


def _drafted_logprobs(offer: Nodes, parent: int) -> dict[int, float]:
    """Return the log-probabilities that the draft model gave the candidates below ``parent``, by token."""
    above = 0.0 if parent == ROOT else offer.path_logprobs[parent]
    return {
        token: offer.path_logprobs[idx] - above
        for idx, token in enumerate(offer.tokens)
        if offer.parents[idx] == parent and (not offer.writers or offer.writers[idx] & _DRAFT_MODEL)
    }


def _divergence(target: list[float], drafted: list[float]) -> float:
    """Return KL(target || drafted) in nats from some tokens' log-probabilities; all other tokens count as one."""
    others = [max(_LEAST_SHARE, 1.0 - sum(map(math.exp, one))) for one in (target, drafted)]
    named = sum(math.exp(p) * (p - q) for p, q in zip(target, drafted, strict=True) if p > float("-inf"))
    return max(0.0, named + others[0] * math.log(others[0] / others[1]))


def _goes_on(seen: Verification, node: int, count: int) -> bool:
    """Return whether the next ``count`` candidates below ``node`` are the target's choices."""
    child_of = {pair: idx for idx, pair in enumerate(zip(seen.offer.parents, seen.offer.tokens, strict=True))}
    for _ in range(count):
        child = child_of.get((node, seen.choices[node + 1]))
        if child is None:
            return False
        node = child
    return True
