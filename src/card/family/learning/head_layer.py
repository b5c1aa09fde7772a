"""The decoder layer of drafting heads: attention to a memory of rows, then an MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.models.own.head_sizes import EPS, ROTARY_BASE, heads_of


class DraftLayer(nn.Module):
    """Attention over a memory and a gated MLP, of one width d."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = heads_of(width)
        self.norm, self.mlp_norm = nn.RMSNorm(width, eps=EPS), nn.RMSNorm(width, eps=EPS)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def memory(self, rows: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows [B, S, d], [B, H, S, d / H] each.

        Args:
            places: [B, S] int64, positions of the keys' rotation; None: no rotation.
        """
        x = self.norm(rows)
        return turned(self._heads(self.key(x)), places), self._heads(self.value(x))

    def forward(self, rows: Tensor, keys: Tensor, values: Tensor, seen: Tensor, places: Tensor | None = None) -> Tensor:
        """Return rows [B, T, d] after attention to a memory and the MLP.

        Args:
            keys, values: of `memory`, of S rows.
            seen: [B or 1, T or 1, S] bool.
            places: [B, T] of the rows; None: no rotation.
        """
        query = turned(self._heads(self.query(self.norm(rows))), places)
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None])
        rows = rows + self.out(mixed.transpose(1, 2).flatten(2))
        x = self.mlp_norm(rows)
        added: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return rows + added

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads).transpose(1, 2)


def turned(heads: Tensor, places: Tensor | None) -> Tensor:
    """Rotate halves of channels [B, H, S, d / H] by places (RoPE, arXiv:2104.09864)."""
    if places is None:
        return heads
    half = heads.shape[-1] // 2
    rates = ROTARY_BASE ** (-torch.arange(half) / half)
    angles = places[:, None, :, None] * rates
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
