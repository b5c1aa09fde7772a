"""Models of patches whose law is known, and tiny forecasters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from card.labs.series.laws import Gaussian
from card.labs.series.transformer import PatchTransformer, Shape

TINY = Shape(patch_size=2, width=16, num_layers=2, num_heads=2, max_patches=16)


class Walk:
    """A target whose next patch is a share of the last one, plus noise: its paths have a law in closed form."""

    patch_size, max_patches = 1, 32

    def __init__(self, share: float, std: float) -> None:
        self.share, self.std = share, std

    def open(self, context: Tensor, num_paths: int, num_patches: int) -> Walk:
        return self

    def extend(self, patches: Tensor, starts: Tensor) -> Gaussian:
        return Gaussian(self.share * patches, torch.full_like(patches, self.std))

    def keep(self, rows: Tensor) -> None:
        pass


def tiny_forecaster(seed: int = 0, shape: Shape = TINY) -> PatchTransformer:
    """Return the same random forecaster each time; its laws depend on all that it has read."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PatchTransformer(shape)
        torch.nn.init.normal_(model.head.weight, std=0.4)
    return model.train(False)


@contextmanager
def counting_passes(model: PatchTransformer) -> Iterator[list[tuple[int, int]]]:
    """Note rows and patches of each pass."""
    passes: list[tuple[int, int]] = []
    handle = model.embed.register_forward_hook(lambda _, given, __: passes.append(tuple(given[0].shape[:2])))
    yield passes
    handle.remove()
