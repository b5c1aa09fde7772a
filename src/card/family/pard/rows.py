"""Training rows of a drafter of K tokens a pass: a text, and masks after some of its tokens.

After an *origin*, a token of the text, come masks at *offsets* 1, 2, ... K - 1. The mask at offset i has the position
of the i-th token after the origin and learns the token after that one. It sees the text up to the origin and the masks
between, as in drafting. All masks of all origins are in one row, separated by an attention mask.

Conditional drop (COD) keeps masks at offset i only for some of the origins kept at offset i - 1, so that the masks
between an origin and a mask always exist.

Source: PARD, arXiv:2504.18583.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # label of tokens that are not learnt
_NOWHERE = 1 << 30  # origin of padding, so that no other token sees it


@dataclass(frozen=True, slots=True)
class Document:
    """A training text."""

    token_ids: Sequence[int]  # N of them
    first: int = 1  # index of the first learnt token: the answer's, or the second of a plain text


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Shares of masks that conditional drop keeps, by offset."""

    num_tokens: int  # K
    retention: float  # share of an offset's origins that the next offset keeps; 1 drops nothing
    least: float = 0.0  # share of the origins that every offset keeps

    def share(self, offset: int) -> float:
        """Return the share of the origins that has a mask at this offset, in [0, 1]."""
        return max(self.retention**offset, self.least)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of S tokens: the text first, at offset 0, then the masks."""

    token_ids: Tensor  # [S] int64
    positions: Tensor  # [S] int64
    origins: Tensor  # [S] int64; the position itself for a token of the text
    labels: Tensor  # [S] int64; IGNORED for tokens before the learnt ones

    @property
    def num_trained(self) -> int:
        """Positions that the model is run on."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows of one step, padded on the right."""

    token_ids: Tensor  # [B, S] int64
    positions: Tensor  # [B, S] int64
    origins: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64

    @property
    def offsets(self) -> Tensor:
        """Return the offset of each token, [B, S] int64; meaningless for padding."""
        return self.positions - self.origins

    @property
    def attention(self) -> Tensor:
        """Return which tokens each token sees, [B, 1, S, S] bool: query, then key."""
        origins, offsets = self.origins, self.offsets
        sees_text = (offsets == 0)[:, None, :] & (origins[:, None, :] <= origins[:, :, None])
        is_own = origins[:, None, :] == origins[:, :, None]
        return (sees_text | (is_own & (offsets[:, None, :] <= offsets[:, :, None])))[:, None]


def kept_origins(document: Document, drop: Drop, generator: torch.Generator) -> list[Tensor]:
    """Draw the origins that have a mask at offset 1, 2, ... K - 1, each a subset of the previous offset's.

    Returns: K - 1 tensors of positions, int64, ascending.
    """
    last = len(document.token_ids) - 2  # the last position that has a label
    origins = torch.arange(document.first - 1, last + 1)
    num_all, remaining = len(origins), []
    for offset in range(1, drop.num_tokens):
        origins = origins[origins + offset <= last]
        num_kept = min(len(origins), round(num_all * drop.share(offset)))
        if num_kept < len(origins):
            chosen = torch.randperm(len(origins), generator=generator)[:num_kept]
            origins = origins[chosen.sort().values]
        remaining.append(origins)
    return remaining


def packed_row(document: Document, origins: Sequence[Tensor], mask_id: int) -> PackedRow:
    """Return the row of a text with masks at offset i + 1 for each of ``origins[i]``."""
    text = torch.tensor(document.token_ids, dtype=torch.int64)
    places = torch.arange(len(text))
    next_ids = torch.cat([text[1:], torch.tensor([IGNORED])])
    next_ids = next_ids.masked_fill(places < document.first - 1, IGNORED)
    mask_positions = [origin + offset for offset, origin in enumerate(origins, 1)]
    positions = torch.cat([places, *mask_positions])
    token_ids = torch.cat([text, torch.full((len(positions) - len(text),), mask_id)])
    return PackedRow(token_ids, positions, torch.cat([places, *origins]), next_ids[positions])


def batch_of(rows: Sequence[PackedRow]) -> PackedBatch:
    """Return padded rows; padding sees everything, and no token sees it."""

    def padded(parts: Sequence[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=value)

    return PackedBatch(
        padded([row.token_ids for row in rows], 0),
        padded([row.positions for row in rows], 0),
        padded([row.origins for row in rows], _NOWHERE),
        padded([row.labels for row in rows], IGNORED),
    )
