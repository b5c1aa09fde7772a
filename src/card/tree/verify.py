"""Acceptance rules: which candidates the target keeps.

*Match* walks down from the root, takes the target's own choice at each node, and goes on while it is a candidate. Every
emitted token is the target's choice, so the text is that of plain decoding, token for token, for any candidates.
*Ratio* is the rule of speculative sampling: equal to plain decoding in law, not in seed; for baselines defined by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from card.errors import CardError

ROOT = -1  # parent index of a candidate below the root


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


def acceptance_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return, for each token, the chance of keeping it if it was drafted.

    Args:
        target_probs: [..., V] float; each row sums to 1.
        draft_probs: [..., V] float; the very distribution that the draft tokens were drawn from.
    Returns: [..., V] in [0, 1]; 1 where the draft gives a token no more weight than the target does.
    Raises: CardError if the two shapes differ.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    if target_probs.shape != draft_probs.shape:
        raise CardError(f"target_probs {tuple(target_probs.shape)} and draft_probs {tuple(draft_probs.shape)} differ")
    return torch.where(draft_probs > target_probs, target_probs / draft_probs, 1.0)


def residual_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return the distribution that a token is drawn from after a rejection: max(target - draft, 0), normalised.

    Where the two are equal up to rounding no mass is left; the target's own distribution is returned there.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    left = (target_probs - draft_probs).clamp_min(0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, target_probs)
