"""A judge, and the verifier that asks it.

The verifier follows the target's own choices, like the exact one. Where no candidate is the target's choice, a judge
may accept one nevertheless. So every token that a judge never sees is the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from card.tree.logits import FloatArray, as_array, log_softmax
from card.tree.nodes import ROOT
from card.tree.verify import Verdict, Verification


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A place where no candidate is the target's choice, and one of the candidates there."""

    seen: Verification
    parent: int  # node that the candidate hangs below, or ROOT
    candidate: int
    logprobs: FloatArray  # [V] float32 of the target after the parent, at temperature 1

    @property
    def logprob(self) -> float:
        """Log-probability that the target gives the candidate, at temperature 1."""
        return float(self.logprobs[self.seen.offer.tokens[self.candidate]])


class Judge(Protocol):
    """Decides which candidates are accepted against the target's choice."""

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate is accepted."""


class JudgingVerifier:
    """Accepts the target's choices, and otherwise the likeliest candidate that the judge tolerates."""

    def __init__(self, judge: Judge, *, is_exact: bool = False) -> None:
        """Use this judge; ``is_exact`` is True for one that tolerates nothing."""
        self.is_exact = is_exact
        self.judge = judge

    def decide(self, seen: Verification) -> Verdict:
        """Return the accepted path and the target's own token after it."""
        children: dict[int, list[int]] = {}
        for idx, parent in enumerate(seen.offer.parents):
            children.setdefault(parent, []).append(idx)
        node, accepted = ROOT, list[int]()
        while below := children.get(node, []):
            exact_child = next((i for i in below if seen.offer.tokens[i] == seen.choices[node + 1]), None)
            chosen = self._tolerated(seen, node, below) if exact_child is None else exact_child
            if chosen is None:
                break
            accepted.append(chosen)
            node = chosen
        return Verdict(tuple(accepted), seen.choices[node + 1])

    def _tolerated(self, seen: Verification, parent: int, below: list[int]) -> int | None:
        """Return the candidate below ``parent`` that the judge accepts; None if it accepts none."""
        logprobs = log_softmax(as_array(seen.logits[parent + 1 : parent + 2]))[0]
        mismatches = [Mismatch(seen, parent, candidate, logprobs) for candidate in below]
        mismatches.sort(key=lambda one: -one.logprob)
        possible = (one for one in mismatches if one.logprob > float("-inf"))  # a grammar may have ruled it out
        return next((one.candidate for one in possible if self.judge.tolerates(one)), None)
