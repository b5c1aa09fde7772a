"""Verifiers of proposed values by the ratio of two densities: the exact rule, and published rules that are not exact.

A value x from the draft's law q stays with probability min(1, p(x) / q(x)), where p is the target's law. Else it is
replaced by a value of the residual law, which is proportional to max(0, p - q). The result has the law p, for any q.
After a chain that was accepted whole, the target's last law gives one more value from the same pass.

Sources: Leviathan et al. 2023, arXiv:2211.17192 (the rule, for tokens); Subbaraman et al. 2025, STRIDE,
arXiv:2511.18191 (patches of a time series as values). Each mode besides "exact" follows the published code of STRIDE in
one point where that code differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from card.errors import SettingsError, named
from card.labs.series.laws import Gaussian, Law

MAX_DRAWS = 1 << 20  # of one residual value: its law is then off by less than 1 / (e * MAX_DRAWS) in total variation
_MAX_BLOCK = 1 << 12  # draws per block, over all places

L = TypeVar("L", bound=Law)


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """Results of verifying chains of K proposals, one chain for each of B paths."""

    num_accepted: Tensor  # [B] int64, from 0 to K
    next_value: Tensor  # [B, ...] the value after the accepted ones: recovered, or the bonus


def residual(target: L, draft: L, generator: torch.Generator) -> Tensor:
    """Draw a value of each residual law, which is proportional to max(0, p - q), by rejection sampling.

    A draw z from p is taken with probability max(0, 1 - q(z) / p(z)), which succeeds once in 1 / TV(p, q) draws. A
    residual value is needed with probability TV(p, q), so a proposal costs one draw on average. After MAX_DRAWS draws
    without success the last one is returned. Such close laws need a residual so rarely that the law of the emitted
    values changes by less than 4e-7 in total variation.

    Args:
        target: p, with B places.
        draft: q, with B places.
    Returns: [B, ...] values.
    """
    values = target.sample(generator)
    waiting = torch.arange(len(values), device=values.device)
    num_draws, block = 0, 1
    while len(waiting) and num_draws < MAX_DRAWS:
        places = waiting.repeat_interleave(block)
        p, q = target[places], draft[places]
        draws = p.sample(generator)
        is_taken = _coins(p.log_prob(draws), generator) >= (q.log_prob(draws) - p.log_prob(draws))
        is_taken = is_taken.view(-1, block)
        first = is_taken.int().argmax(1)  # the first success; 0 if there is none, and the place stays open
        values[waiting] = draws.view(len(waiting), block, *draws.shape[1:])[torch.arange(len(waiting)), first]
        waiting = waiting[~is_taken.any(1)]
        num_draws += block
        block = max(1, min(2 * block, _MAX_BLOCK // max(len(waiting), 1)))
    return values


def _coins(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return logarithms of uniform numbers above 0 and up to 1, in the shape of ``like``."""
    uniform = torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device)
    return (1.0 - uniform).log()


def redraw(target: L, draft: L, generator: torch.Generator) -> Tensor:
    """Draw from the target's law itself, as the published code does after a rejection; this is not exact."""
    return target.sample(generator)


@dataclass(frozen=True, slots=True)
class AcceptanceRule(Generic[L]):
    """A rule of acceptance, and the law of the value that replaces the first rejected one."""

    log_ratio: Callable[[L, L, Tensor], Tensor]  # (p, q, proposals) to log of the chance to stay; 0 or more is certain
    replace: Callable[[L, L, torch.Generator], Tensor]
    is_exact: bool

    def verify(self, target: L, draft: L, proposals: Tensor, generator: torch.Generator) -> ChainVerdict:
        """Accept a part of each chain of proposals, and draw the next value.

        Args:
            target: laws at B paths and K + 1 places, the last one after the whole chain.
            draft: laws at B paths and K places, from which the proposals were drawn.
            proposals: [B, K, ...].
        """
        num_paths, num_proposed = proposals.shape[:2]
        log_ratio = self.log_ratio(target[:, :num_proposed], draft, proposals)
        stays = _coins(log_ratio, generator) <= log_ratio
        num_accepted = stays.long().cumprod(1).sum(1)
        next_value = target[torch.arange(num_paths), num_accepted].sample(generator)
        rejected = (num_accepted < num_proposed).nonzero().squeeze(1)
        if len(rejected):
            places = rejected, num_accepted[rejected]
            next_value[rejected] = self.replace(target[places], draft[places], generator)
        return ChainVerdict(num_accepted, next_value)


def density_ratio(target: Law, draft: Law, proposals: Tensor) -> Tensor:
    """Return log p(x) - log q(x)."""
    return target.log_prob(proposals) - draft.log_prob(proposals)


def averaged_ratio(target: Gaussian, draft: Gaussian, proposals: Tensor) -> Tensor:
    """Return the log ratio as if all elements of a patch and both laws had one variance, their mean."""
    variance = (0.5 * (target.std.square() + draft.std.square())).mean(-1)
    return _ratio_of_width(target, draft, proposals, variance)


def adaptive_ratio(target: Gaussian, draft: Gaussian, proposals: Tensor) -> Tensor:
    """Return the log ratio with the variance 1.5 mean((mean of p - mean of q)^2) instead of the laws' own."""
    variance = 1.5 * (target.mean - draft.mean).square().mean(-1)
    return _ratio_of_width(target, draft, proposals, variance.clamp(1e-6, 1e6))


def _ratio_of_width(target: Gaussian, draft: Gaussian, proposals: Tensor, variance: Tensor) -> Tensor:
    off_target = (proposals - target.mean).square().sum(-1)
    off_draft = (proposals - draft.mean).square().sum(-1)
    return (off_draft - off_target) / (2 * variance)


def tolerant_ratio(tolerance: float) -> Callable[[Gaussian, Gaussian, Tensor], Tensor]:
    """Return a log ratio that is certain where a proposal lies near the target's mean.

    Args:
        tolerance: most mean squared distance of a patch, in squared units of the normalised series.
    """

    def ratio(target: Gaussian, draft: Gaussian, proposals: Tensor) -> Tensor:
        distance = (proposals - target.mean).square().mean(-1)
        return density_ratio(target, draft, proposals).masked_fill(distance <= tolerance, 0.0)

    return ratio


MODES = ("exact", "redraw", "averaged", "adaptive", "tolerance")


def find_rule(mode: str, tolerance: float = 0.5) -> AcceptanceRule[Gaussian]:
    """Return the rule of a mode.

    Args:
        tolerance: of the mode of that name, in squared units of the normalised series.
    Raises: SettingsError if there is no such mode, or the tolerance is negative or no number.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0.0):
        raise SettingsError(f"tolerance must be a number of 0 or more, got {tolerance}")
    rules: Mapping[str, AcceptanceRule[Gaussian]] = {
        "exact": AcceptanceRule(density_ratio, residual, is_exact=True),
        "redraw": AcceptanceRule(density_ratio, redraw, is_exact=False),
        "averaged": AcceptanceRule(averaged_ratio, redraw, is_exact=False),
        "adaptive": AcceptanceRule(adaptive_ratio, redraw, is_exact=False),
        "tolerance": AcceptanceRule(tolerant_ratio(tolerance), redraw, is_exact=False),
    }
    if mode not in rules:
        raise SettingsError(f"{named('mode')} must be one of {', '.join(MODES)}, got {mode!r}")
    return rules[mode]
