"""Rows of a KV cache that matter: scores of all rows by a pass's attention, and the choice of the best ones.

A pass may keep scores of the rows that it reads, and a later one read the best rows only. Both are optional and cost
nothing unless a method asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from card.config.selection import BLOCK_ROWS, ScoreKind
from card.errors import ModelError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The rows of a sequence that a pass reads in layers without a window: some old ones, and all newer ones."""

    rows: IntArray  # [L, Hkv, N] of each layer and KV head, ascending, all below ``since``
    since: int  # rows from this one on are read by every layer and head

    def num_read(self, num_rows: int) -> int:
        """Return how many of ``num_rows`` rows a layer reads for each KV head."""
        return int(self.rows.shape[2]) + num_rows - self.since


def _mean_weights(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1).mean((1, 2))


def _mean_logits(logits: Tensor) -> Tensor:
    return logits.mean((1, 2))


MEANS: Mapping[ScoreKind, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"weights": _mean_weights, "logits": _mean_logits}
)
"""Scores [Hkv, S] of rows, by attention logits [Hkv, T, G, S] of T new rows and the G query heads of each KV head.

A logit of -inf says that the new row does not see that one. Sources: mean weights as in SparseSpec (arXiv:2512.01278),
mean logits after Vegas (arXiv:2602.07223).
"""


def choose_rows(scores: Tensor, count: int) -> IntArray:
    """Return the ``count`` rows with the best scores (all, if there are fewer): [..., N] ascending of [..., S]."""
    best = torch.topk(scores, min(count, scores.shape[-1]), sorted=False).indices
    return best.sort(-1).values.numpy()


def choose_blocks(scores: Tensor, count: int, *, num_first: int, num_last: int) -> IntArray:
    """Return ``count`` rows in the blocks with the best scores, and the blocks at both ends: [..., N] ascending.

    Args:
        scores: [..., S], the same for all rows of a block.
        num_first, num_last: rows of the blocks at the ends that are read whatever their scores; num_last is 1 or more.
    """
    of_blocks = scores[..., ::BLOCK_ROWS].clone()
    num_blocks, num_missing = of_blocks.shape[-1], -scores.shape[-1] % BLOCK_ROWS  # rows that the last block lacks
    firsts, lasts = (-(-rows // BLOCK_ROWS) for rows in (num_first, num_last + num_missing))
    of_blocks[..., :firsts] = of_blocks[..., max(0, num_blocks - lasts) :] = torch.inf
    blocks = choose_rows(of_blocks, firsts + lasts + count // BLOCK_ROWS)
    rows = (blocks[..., None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).reshape(*blocks.shape[:-1], -1)
    return np.ascontiguousarray(rows[..., : rows.shape[-1] - num_missing])  # every list ends with the last block


def bound_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Return scores [Hkv, S]: the mean, over T new rows and G query heads, of a bound on the logits of a row's block.

    The bound is the sum over channels of max(q k_max, q k_min), with the largest and the least key of the block in each
    channel. Source: Quest, arXiv:2406.10774; the code of SpecPV takes a smaller number, which is no bound.

    Args:
        query: [Hkv, T, G, D], scaled as the logits are.
        keys: [Hkv, S, D].
    """
    rows = keys.shape[1]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -rows % BLOCK_ROWS))
    if rows % BLOCK_ROWS:
        padded[:, rows:] = keys[:, -1:]
    blocks = padded.unflatten(1, (-1, BLOCK_ROWS))  # type: ignore[no-untyped-call]
    largest, least = blocks.amax(2).float(), blocks.amin(2).float()
    flat = query.flatten(1, 2).float()
    bounds = flat.clamp_min(0) @ largest.transpose(1, 2) + flat.clamp_max(0) @ least.transpose(1, 2)
    scores: Tensor = bounds.mean(1).repeat_interleave(BLOCK_ROWS, 1)
    return scores[:, :rows]


class AttentionScores:
    """Scores that a pass keeps for those of its sequences that asked for them."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def leave(self, kept: Mapping[int, Tensor]) -> None:
        """Hold what a pass has kept, by slot, until the next one."""
        self._kept = dict(kept)

    def of(self, slot: int) -> Tensor:
        """Return the last pass's scores [L, Hkv, S] float32 of the S rows that a sequence held before it.

        Those of layers with a window are 0. Raises: ModelError if it kept none for that sequence.
        """
        if slot not in self._kept:
            raise ModelError(f"the last pass kept no attention scores of slot {slot}; ask for them in its extension")
        return self._kept[slot]
