"""A causal transformer over patches of a normalised series; its head gives a normal law of each next patch.

It has a KV cache, so the cost of a pass is that of its new patches. A row's place is its position, and later rows are
never read, so rejected patches are overwritten.

Source: Nie et al. 2023, PatchTST, arXiv:2211.14730 (patches as tokens, one series at a time).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.errors import SettingsError, named
from card.labs.series.laws import Gaussian

_LEAST_STD = 1e-3  # of the normalised series
_ROTARY_BASE = 1000.0  # positions are patches: a few hundred at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a forecaster."""

    patch_size: int = 8  # values in a patch
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_patches: int = 64  # context and forecast together

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise SettingsError(f"{name} must be a whole number of 1 or more, got {getattr(self, name)!r}")
        if self.width % (2 * self.num_heads):
            raise SettingsError(
                f"{named('width')} must be a multiple of twice num_heads ({2 * self.num_heads}), got {self.width}"
            )


SHAPES = {"large": Shape(), "small": Shape(width=32, num_layers=1, num_heads=2)}  # of a target, of a draft


class PatchTransformer(nn.Module):
    """A decoder of patches: rotary positions, norms before attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_size, self.max_patches = shape.patch_size, shape.max_patches
        self.embed = nn.Linear(shape.patch_size, shape.width)
        self.layers = nn.ModuleList(_TransformerLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, 2 * shape.patch_size)
        nn.init.zeros_(self.head.weight)  # begins as a walk from the last value

    def forward(self, patches: Tensor) -> Gaussian:
        """Return the law of the patch after each one: [B, T, P] to laws at B rows and T places."""
        starts = torch.zeros(len(patches), dtype=torch.int64, device=patches.device)
        return self._read(patches, starts, [None] * len(self.layers))

    def open(self, context: Tensor, num_paths: int, num_patches: int) -> PatchPaths:
        """Begin paths that share a context.

        Args:
            context: [N, P] patches of the normalised series; all but the last are read.
            num_patches: room of a path, its context included.
        """
        cache = [_Cache(self.shape, 1, num_patches, context) for _ in self.layers]
        if len(context) > 1:
            self._read(context[None, :-1], torch.zeros(1, dtype=torch.int64, device=context.device), cache)
        for one in cache:
            one.keep(torch.zeros(num_paths, dtype=torch.int64, device=context.device))
        return PatchPaths(self, cache)

    def _read(self, patches: Tensor, starts: Tensor, caches: list[_Cache] | list[None]) -> Gaussian:
        positions = starts[:, None] + torch.arange(patches.shape[1], device=patches.device)
        rotary = _rotary(positions, self.shape.width // self.shape.num_heads)
        hidden = self.embed(patches)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, positions, rotary, cache)
        mean, width = self.head(self.norm(hidden)).chunk(2, -1)
        return Gaussian(patches[..., -1:] + mean, functional.softplus(width) + _LEAST_STD)


class PatchPaths:
    """Paths of a `PatchTransformer`."""

    def __init__(self, model: PatchTransformer, cache: list[_Cache]) -> None:
        self._model, self._cache = model, cache

    def extend(self, patches: Tensor, starts: Tensor) -> Gaussian:
        """Read patches [B, T, P] that begin at the places ``starts`` [B]; return the laws after each of them."""
        with torch.no_grad():
            return self._model._read(patches, starts, self._cache)

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the paths."""
        for one in self._cache:
            one.keep(rows)


class _Cache:
    """Keys and values of one layer: [B, S, H, D]; a path's patch at place s has row s."""

    def __init__(self, shape: Shape, num_paths: int, num_patches: int, like: Tensor) -> None:
        sizes = num_paths, num_patches, shape.num_heads, shape.width // shape.num_heads
        self.keys, self.values = (torch.zeros(sizes, dtype=like.dtype, device=like.device) for _ in range(2))

    def write(self, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows, and return all rows up to the last place of any path."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[rows, positions], self.values[rows, positions] = keys, values
        end = int(positions.max()) + 1
        return self.keys[:, :end], self.values[:, :end]

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]


class _TransformerLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv, self.out = (nn.Linear(shape.width, width) for width in (3 * shape.width, shape.width))
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], cache: _Cache | None) -> Tensor:
        """Return the hidden values after this layer: [B, T, width]."""
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys = _turn(qkv[:, :, 0], rotary), _turn(qkv[:, :, 1], rotary)
        values = qkv[:, :, 2]
        if cache is not None:
            keys, values = cache.write(positions, keys, values)
        places = torch.arange(keys.shape[1], device=keys.device)
        seen = (places <= positions[..., None])[:, None]  # [B, 1, T, S]
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen
        )
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(hidden))))
        return hidden + added


def _rotary(positions: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines: [B, T, 1, D / 2]."""
    exponents = torch.arange(0, head_size, 2, device=positions.device) / head_size
    angles = positions[..., None, None] * _ROTARY_BASE**-exponents
    return angles.cos(), angles.sin()


def _turn(values: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    first, second = values.chunk(2, -1)
    cos, sin = (one.to(values.dtype) for one in rotary)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
