"""A model's laws of its next value: log-probability and samples, one law for each place.

Verification needs nothing else of a law, so that a value may be a patch of numbers or a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Law(Protocol):
    """Laws of values, one for each place of a batch."""

    def log_prob(self, values: Tensor) -> Tensor:
        """Return the log-density, in nats, or the log-probability of a value at each place."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """Return an independent value for each place."""

    def __getitem__(self, places: Any) -> Self:
        """Return the laws of some places, by the indices that a tensor takes."""


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Normal laws of patches whose elements are independent of each other, given what came before."""

    mean: Tensor  # [..., P] float
    std: Tensor  # [..., P] float, above 0

    def log_prob(self, values: Tensor) -> Tensor:
        """Return the log-density of each patch in nats: [..., P] to [...]."""
        deviations = (values - self.mean) / self.std
        return -(0.5 * deviations.square() + self.std.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Return a patch for each place: [..., P]."""
        noise = torch.randn(self.mean.shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + self.std * noise

    def __getitem__(self, places: Any) -> Gaussian:
        return Gaussian(self.mean[places], self.std[places])
