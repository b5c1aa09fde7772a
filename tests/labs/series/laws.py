"""Laws for tests: tokens by the interface of patches, and how far samples are off a law."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Categorical:
    """Laws of tokens."""

    probs: Tensor  # [..., V]

    def log_prob(self, values: Tensor) -> Tensor:
        return self.probs.gather(-1, values.unsqueeze(-1)).squeeze(-1).log()

    def sample(self, generator: torch.Generator) -> Tensor:
        rows = self.probs.reshape(-1, self.probs.shape[-1])
        return torch.multinomial(rows, 1, generator=generator).view(self.probs.shape[:-1])

    def __getitem__(self, places: Any) -> Categorical:
        return Categorical(self.probs[places])


def excess(counts: Tensor, probs: Tensor) -> float:
    """Return by how many standard deviations the chi-square of counts exceeds its mean under ``probs``."""
    expected = counts.sum() * probs.double()
    kept = expected >= 8.0
    statistic = ((counts - expected)[kept].square() / expected[kept]).sum()
    freedom = max(int(kept.sum()) - 1, 1)
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def normal_excess(values: Tensor, mean: Tensor | float, std: Tensor | float, num_bins: int = 30) -> float:
    """Return the same of numbers in equally likely bins of a normal law."""
    shares = 0.5 * (1 + torch.erf((values.double() - mean) / std / math.sqrt(2)))
    counts = torch.bincount((shares * num_bins).long().clamp(0, num_bins - 1).flatten(), minlength=num_bins)
    return excess(counts, torch.full((num_bins,), 1.0 / num_bins))
