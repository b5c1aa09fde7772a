"""The layers of a decoder as arrays: weights as they are stored, or blocks of a GGUF file that are never unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from card.kernels.blocks import block_linear
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import BlockFormat, Bytes
from card.kernels.number_types import Array, Floats
from card.kernels.packed_linear import PANEL, PackedLinear
from card.models.rows.row_tree import IntArray

# Of rows that a runner keeps as floats: 1,365 of a width of 1,536. Of 4,000 tokens of this package's code and pages, by
# the tokenizer of Qwen2.5, 720 to 1,080 are different ones.
_KEPT_BYTES = 1 << 23


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight [out, in] as blocks."""

    type_id: int  # ggml's number of their type
    data: Bytes  # panels of a layer, as `BlockFormat.pack` writes them, or rows of embeddings, as in the file
    shape: tuple[int, ...]

    @property
    def form(self) -> BlockFormat:
        """The format of its blocks."""
        return BLOCK_FORMATS[self.type_id]

    @property
    def size(self) -> int:
        """Number of weights, whatever bits they take."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return int(self.data.nbytes)

    def rows(self, chosen: IntArray) -> Floats:
        """Return some rows of embeddings as the numbers that they stand for, [n, in]."""
        return self.form.numbers(self.data[chosen])


Weight = Array | BlockWeight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A linear layer."""

    weight: Weight  # [out, in]
    bias: Array | None = None  # [out]

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return int(self.weight.shape[0])

    @property
    def has_blocks(self) -> bool:
        """Return whether its weights are blocks."""
        return isinstance(self.weight, BlockWeight)

    def select(self, channels: IntArray) -> Linear:
        """Return a layer that has some of the outputs."""
        bias = None if self.bias is None else self.bias[channels]
        weight = self.weight
        if not isinstance(weight, BlockWeight):
            return Linear(weight[channels], bias)
        panels = weight.form.select(weight.data, weight.shape[1], channels)
        return Linear(BlockWeight(weight.type_id, panels, (len(channels), weight.shape[1])), bias)

    def blocks_packed(self, *, factor: float = 1.0, out_multiple: int = PANEL) -> PackedLinear:
        """Return a layer of blocks for the machine code, its results times a factor; see `block_linear`."""
        assert isinstance(self.weight, BlockWeight)
        bias = None if self.bias is None else self.bias.astype(np.float32) * np.float32(factor)
        return block_linear(
            self.weight.data, self.weight.form, self.out_features, factor=factor, bias=bias, out_multiple=out_multiple
        )


class EmbeddedRows:
    """Rows of embeddings for the passes of one runner, those of the latest tokens kept as floats.

    Texts repeat their tokens, and to unpack the blocks of one takes half as long as a whole pass of a small model.
    """

    def __init__(self, embeddings: Weight, *, kept_bytes: int = _KEPT_BYTES) -> None:
        """Keep up to ``kept_bytes`` of rows that were read."""
        self._embeddings = embeddings
        num_rows, width = embeddings.shape
        num_kept = min(max(1, kept_bytes // (4 * width)), num_rows)
        self._kept: Floats = np.empty((num_kept, width), np.float32)
        self._place_of: dict[int, int] = {}  # by token

    def of(self, token_ids: Sequence[int]) -> Floats:
        """Return the rows of tokens [n], [n, D]."""
        places = self._place_of
        new_ids = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in places]
        if len(places) + len(new_ids) > len(self._kept):
            places.clear()
            new_ids = list(dict.fromkeys(token_ids))
            if len(new_ids) > len(self._kept):
                return embedded(self._embeddings, token_ids)
        if new_ids:
            first = len(places)
            self._kept[first : first + len(new_ids)] = embedded(self._embeddings, new_ids)
            places.update((token_id, first + i) for i, token_id in enumerate(new_ids))
        return self._kept[[places[token_id] for token_id in token_ids]]


def embedded(embeddings: Weight, token_ids: Sequence[int]) -> Floats:
    """Return the rows of tokens [n] as they are stored, [n, D]: an architecture may scale them afterwards."""
    chosen = np.asarray(token_ids, np.int64)
    if isinstance(embeddings, BlockWeight):
        return embeddings.rows(chosen)
    rows: Any = embeddings[chosen]
    return rows.astype(np.float32, copy=False)  # type: ignore[no-any-return]
