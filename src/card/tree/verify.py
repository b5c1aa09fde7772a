"""Verifiers: they decide which candidates stay and which token follows.

The exact verifier is `MATCH`: it walks down from the root, takes the target's own choice at each node, and goes on
while that is a candidate. Every emitted token is the target's choice, so the text is that of plain decoding, token for
token, for any candidates. Others may be lenient; they say so, and every result of theirs does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from card.tree.logits import FloatArray, Logits
from card.tree.nodes import ROOT, Nodes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one verification: the accepted candidates from the root down, then the target's own token."""

    accepted: tuple[int, ...]  # indices into the candidates
    next_id: int  # recovered or bonus token


@dataclass(frozen=True, slots=True)
class Verification:
    """Findings of a target pass about N candidates of one request."""

    offer: Nodes  # the candidates
    logits: Logits  # [1 + N, V] of the target after the root and after each candidate; grammar and penalties applied
    choices: Sequence[int]  # the token that the target's sampler takes of each row
    first_place: int  # in the text, of the candidates below the root
    features: FloatArray | None = None  # [1 + N, F] of the same rows, if the verifier's judge wishes for hidden states

    def leniently_accepted(self, verdict: Verdict) -> int:
        """Return how many of the accepted candidates are not the target's choice."""
        parents = (ROOT, *verdict.accepted)
        pairs = zip(verdict.accepted, parents, strict=False)
        return sum(self.offer.tokens[node] != self.choices[parent + 1] for node, parent in pairs)


class Verifier(Protocol):
    """Decides what one verification commits."""

    is_exact: bool  # the text is that of plain decoding, whatever the candidates are

    def decide(self, seen: Verification) -> Verdict:
        """Return the accepted path, and a token that may follow it: one that its row's logits do not rule out."""


def match(draft_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Accept candidates while they are what the target chooses.

    Args:
        draft_ids: tokens of N candidates; siblings are distinct.
        parents: for each the index of its parent among them, smaller than its own, or ROOT.
        choices: N + 1 tokens of the target: after the root, then after each candidate.
    """
    child_of = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, draft_ids, strict=True))}
    accepted: list[int] = []
    node = ROOT
    while (child := child_of.get((node, choices[node + 1]))) is not None:
        accepted.append(child)
        node = child
    return Verdict(tuple(accepted), choices[node + 1])


class _Match:
    """Accept candidates while they are what the target chooses."""

    is_exact = True

    def decide(self, seen: Verification) -> Verdict:
        return match(seen.offer.tokens, seen.offer.parents, seen.choices)


MATCH: Verifier = _Match()
