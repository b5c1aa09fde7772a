"""Rows of a KV cache that matter: scores of all rows by a pass's attention, and the choice of the best ones.

A pass may keep scores of the rows that it reads, and a later one read the best rows only. Both are optional and cost
nothing unless a method asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from card.config.selection import BLOCK_ROWS
from card.errors import ModelError
from card.kernels.number_types import Floats

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The rows of a sequence that a pass reads in layers without a window: some old ones, and all newer ones."""

    rows: IntArray  # [L, Hkv, N] of each layer and KV head, ascending, all below ``since``
    since: int  # rows from this one on are read by every layer and head

    def num_read(self, num_rows: int) -> int:
        """Return how many of ``num_rows`` rows a layer reads for each KV head."""
        return int(self.rows.shape[2]) + num_rows - self.since


def choose_rows(scores: Floats, count: int) -> IntArray:
    """Return the ``count`` rows with the best scores (all, if there are fewer): [..., N] ascending of [..., S]."""
    num_rows = scores.shape[-1]
    if count >= num_rows:
        return np.broadcast_to(np.arange(num_rows), scores.shape).copy()
    best = np.ascontiguousarray(np.argpartition(-scores, count - 1, axis=-1)[..., :count])  # the machine code reads it
    best.sort(axis=-1)
    return best


def choose_blocks(scores: Floats, count: int, *, num_first: int, num_last: int) -> IntArray:
    """Return ``count`` rows in the blocks with the best scores, and the blocks at both ends: [..., N] ascending.

    Args:
        scores: [..., S], the same for all rows of a block.
        num_first, num_last: rows of the blocks at the ends that are read whatever their scores; num_last is 1 or more.
    """
    of_blocks = scores[..., ::BLOCK_ROWS].copy()
    num_blocks, num_missing = of_blocks.shape[-1], -scores.shape[-1] % BLOCK_ROWS  # rows that the last block lacks
    firsts, lasts = (-(-rows // BLOCK_ROWS) for rows in (num_first, num_last + num_missing))
    of_blocks[..., :firsts] = of_blocks[..., max(0, num_blocks - lasts) :] = np.inf
    blocks = choose_rows(of_blocks, firsts + lasts + count // BLOCK_ROWS)
    rows = (blocks[..., None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).reshape(*blocks.shape[:-1], -1)
    return np.ascontiguousarray(rows[..., : rows.shape[-1] - num_missing])  # every list ends with the last block


def bound_scores(query: Floats, keys: Floats) -> Floats:
    """Return scores [Hkv, S]: the mean, over T new rows and G query heads, of a bound on the logits of a row's block.

    The bound is the sum over channels of max(q k_max, q k_min), with the largest and the least key of the block in each
    channel. Source: Quest, arXiv:2406.10774; the code of SpecPV takes a smaller number, which is no bound.

    Args:
        query: [Hkv, T, G, D], scaled as the logits are.
        keys: [Hkv, S, D].
    """
    rows, wide = keys.shape[1], keys.astype(np.float32, copy=False)  # NumPy compares halves five times more slowly
    padded = np.pad(wide, ((0, 0), (0, -rows % BLOCK_ROWS), (0, 0)), mode="edge")
    blocks = padded.reshape(len(keys), -1, BLOCK_ROWS, keys.shape[2])
    largest, least = blocks.max(2), blocks.min(2)
    flat = query.reshape(len(query), -1, query.shape[3]).astype(np.float32)
    bounds = np.maximum(flat, 0) @ largest.transpose(0, 2, 1) + np.minimum(flat, 0) @ least.transpose(0, 2, 1)
    scores: Floats = np.repeat(bounds.mean(1), BLOCK_ROWS, 1)
    return scores[:, :rows]


class AttentionScores:
    """Scores that a pass keeps for those of its sequences that asked for them."""

    def __init__(self) -> None:
        self._kept: dict[int, Floats] = {}

    def leave(self, kept: Mapping[int, Floats]) -> None:
        """Hold what a pass has kept, by slot, until the next one."""
        self._kept = dict(kept)

    def of(self, slot: int) -> Floats:
        """Return the last pass's scores [L, Hkv, S] float32 of the S rows that a sequence held before it.

        Those of layers with a window are 0. Raises: ModelError if it kept none for that sequence.
        """
        if slot not in self._kept:
            raise ModelError(f"the last pass kept no attention scores of slot {slot}; ask for them in its extension")
        return self._kept[slot]
