"""The acceptance rule: which candidates the target keeps.

*Match* walks down from the root, takes the target's own choice at each node, and goes on while it is a candidate. Every
emitted token is the target's choice, so the text is that of plain decoding, token for token, for any candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from card.tree.nodes import ROOT


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification commits: the accepted candidates from the root down, then the target's own token."""

    accepted: tuple[int, ...]  # indices into the candidates
    next_id: int  # recovered or bonus token


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
