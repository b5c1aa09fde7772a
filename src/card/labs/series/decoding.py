"""Rounds of speculation over paths: the draft draws patches ahead, the target verifies them all in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from card.errors import ModelError
from card.labs.series.laws import Gaussian
from card.labs.series.verify import AcceptanceRule


class Paths(Protocol):
    """Sampled continuations of a series within a model; each path has its own length."""

    def extend(self, patches: Tensor, starts: Tensor) -> Gaussian:
        """Read patches [B, T, P] that begin at the places ``starts`` [B]; return the laws after each of them.

        Patches that were read before at these places and after them are dropped.
        """

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the paths, by their indices."""


class PatchModel(Protocol):
    """Models that state the law of the next patch."""

    patch_size: int
    max_patches: int  # context and forecast together

    def open(self, context: Tensor, num_paths: int, num_patches: int) -> Paths:
        """Begin paths with room for ``num_patches`` that share a context [N, P], whose last patch is yet to be read."""


@dataclass(slots=True)
class ForecastStats:
    """Counts of one forecast. A round is one path's share of one target pass."""

    num_patches: int = 0  # drawn, over all paths
    num_rounds: int = 0
    num_target_passes: int = 0  # each over all unfinished paths
    num_checked: int = 0  # proposals up to the first rejected one of each round
    num_accepted: int = 0

    @property
    def patches_per_round(self) -> float:
        """Patches that a path gains in a target pass; 1 without a draft."""
        return self.num_patches / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the proposals that were checked, in [0, 1]; 0 without a draft."""
        return self.num_accepted / self.num_checked if self.num_checked else 0.0


@dataclass(frozen=True, slots=True)
class ForecastPair:
    """A target, perhaps a draft, and the rule of acceptance."""

    target: PatchModel
    draft: PatchModel | None
    rule: AcceptanceRule[Gaussian]
    num_speculative_patches: int


@torch.no_grad()
def sample_paths(
    pair: ForecastPair, context: Tensor, num_patches: int, num_paths: int, generator: torch.Generator
) -> tuple[Tensor, ForecastStats]:
    """Draw continuations of a context.

    Args:
        context: [N, P], at least two patches of the normalised series.
        num_patches: of each continuation.
    Returns: [num_paths, num_patches, P], and counts.
    Raises: ModelError if a model states no finite law.
    """
    first, num_ahead = len(context), pair.num_speculative_patches if pair.draft else 0
    end, room = first + num_patches, first + num_patches + num_ahead + 1
    drawn = context.new_zeros(num_paths, room, context.shape[1])
    drawn[:, :first] = context
    lengths = torch.full((num_paths,), first, device=context.device)
    target = pair.target.open(context, num_paths, room)
    draft = pair.draft.open(context, num_paths, room) if pair.draft else None
    active, stats = torch.arange(num_paths, device=context.device), ForecastStats(num_patches=num_paths * num_patches)
    while len(active):
        begin = lengths[active]
        most = min(num_ahead, int((end - begin).max()) - 1)
        proposals, laws = _propose(draft, drawn[active], begin, most, generator)
        last = drawn[active, begin - 1][:, None]
        seen = target.extend(torch.cat((last, proposals), 1), begin - 1)
        _check_finite(seen, "target")
        verdict = pair.rule.verify(seen, laws, proposals, generator)
        places = begin[:, None] + torch.arange(most, device=context.device)
        drawn[active[:, None], places] = proposals
        drawn[active, begin + verdict.num_accepted] = verdict.next_value
        lengths[active] = begin + verdict.num_accepted + 1
        _count(stats, verdict.num_accepted, most)
        going = (lengths[active] < end).nonzero().squeeze(1)
        if len(going) < len(active):
            active = active[going]
            target.keep(going)
            if draft is not None:
                draft.keep(going)
    return drawn[:, first:end], stats


def _propose(
    draft: Paths | None, drawn: Tensor, begin: Tensor, num_ahead: int, generator: torch.Generator
) -> tuple[Tensor, Gaussian]:
    """Draw patches ahead of each path: [B, num_ahead, P], and the laws that they were drawn from."""
    if draft is None or not num_ahead:
        nothing = drawn[:, :0]
        return nothing, Gaussian(nothing, nothing)
    # After a chain that was accepted whole, the draft has not read its last proposal: read two patches, maybe twice.
    rows = torch.arange(len(drawn), device=drawn.device)[:, None]
    law = draft.extend(drawn[rows, begin[:, None] + torch.tensor([-2, -1], device=drawn.device)], begin - 2)[:, -1]
    laws, proposals = [law], [law.sample(generator)]
    for ahead in range(1, num_ahead):
        law = draft.extend(proposals[-1][:, None], begin + ahead - 1)[:, 0]
        laws.append(law)
        proposals.append(law.sample(generator))
    stated = Gaussian(torch.stack([one.mean for one in laws], 1), torch.stack([one.std for one in laws], 1))
    _check_finite(stated, "draft")
    return torch.stack(proposals, 1), stated


def _check_finite(law: Gaussian, role: str) -> None:
    """Raise ModelError for a law that is not finite: no rule could accept or replace a value by it."""
    if not (law.mean.isfinite().all() and law.std.isfinite().all() and (law.std > 0).all()):
        raise ModelError(f"the {role} states values that are no finite numbers; its weights are broken: train it again")


def _count(stats: ForecastStats, num_accepted: Tensor, num_proposed: int) -> None:
    stats.num_rounds += len(num_accepted)
    stats.num_target_passes += 1
    stats.num_accepted += int(num_accepted.sum())
    stats.num_checked += int((num_accepted + 1).clamp(max=num_proposed).sum())
