"""Layers whose weights are blocks of a GGUF file: they are never unpacked as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from card.kernels.blocks import block_linear
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import BlockFormat
from card.kernels.packed_linear import PANEL, PackedLinear
from card.models.rows.row_tree import FloatArray

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel

# Of rows that a runner keeps as floats: 1,365 of a width of 1,536. Of 4,000 tokens of this package's code and pages, by
# the tokenizer of Qwen2.5, 720 to 1,080 are different ones.
_KEPT_BYTES = 1 << 23


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight [out, in] as blocks."""

    type_id: int  # ggml's number of their type
    data: Tensor  # bytes: panels of a layer, as `BlockFormat.pack` writes them, or rows of embeddings, as in the file
    shape: tuple[int, ...]

    @property
    def form(self) -> BlockFormat:
        """The format of its blocks."""
        return BLOCK_FORMATS[self.type_id]

    def rows(self, chosen: Tensor) -> Tensor:
        """Return some rows of embeddings as the numbers that they stand for, [n, in] float32."""
        return torch.from_numpy(self.form.numbers(self.data.numpy()[chosen.numpy()]))


class BlockLinear(nn.Module):
    """A linear layer of packed blocks."""

    data: Tensor

    def __init__(self, weight: BlockWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._type_id, self._shape = weight.type_id, weight.shape
        self.out_features, self.in_features = weight.shape
        self.register_buffer("data", weight.data)
        self.bias = bias

    @property
    def num_weights(self) -> int:
        """Number of weights, whatever bits they take."""
        return self.out_features * self.in_features

    @property
    def product(self) -> str:
        """The format that machine code knows them by."""
        return BLOCK_FORMATS[self._type_id].product

    def packed(self, *, factor: float = 1.0, out_multiple: int = PANEL) -> PackedLinear:
        """Return the layer for the machine code, its results times a factor; see `block_linear`."""
        bias = None if self.bias is None else self.bias.detach().float() * factor
        form = BLOCK_FORMATS[self._type_id]
        return block_linear(self.data, form, self.out_features, factor=factor, bias=bias, out_multiple=out_multiple)

    def select(self, channels: Tensor) -> BlockLinear:
        """Return a layer that has some of the outputs."""
        form = BLOCK_FORMATS[self._type_id]
        panels = form.select(self.data.numpy(), self.in_features, channels.numpy())
        bias = None if self.bias is None else nn.Parameter(self.bias.detach()[channels], requires_grad=False)
        shape = len(channels), self.in_features
        return BlockLinear(BlockWeight(self._type_id, torch.from_numpy(panels), shape), bias)


class BlockEmbedding(nn.Module):
    """Embeddings of tokens, whose blocks are unpacked row by row when they are looked up."""

    data: Tensor

    def __init__(self, weight: BlockWeight, *, is_tied: bool) -> None:
        """Take the rows; ``is_tied`` if the head has the same weights, in panels of its own."""
        super().__init__()
        self._type_id, self._is_tied = weight.type_id, is_tied
        self.num_embeddings, self.embedding_dim = weight.shape
        self.register_buffer("data", weight.data)

    @property
    def num_weights(self) -> int:
        """Number of weights, whatever bits they take; 0 if they count in the head."""
        return 0 if self._is_tied else self.num_embeddings * self.embedding_dim

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the rows of tokens [n], [n, D] float32."""
        return BlockWeight(self._type_id, self.data, (self.num_embeddings, self.embedding_dim)).rows(token_ids)


class EmbeddedRows:
    """Rows of embeddings for the passes of one runner, those of the latest tokens kept as floats.

    Texts repeat their tokens, and to unpack the blocks of one takes half as long as a whole pass of a small model.
    """

    def __init__(self, embeddings: nn.Embedding | BlockEmbedding, *, kept_bytes: int = _KEPT_BYTES) -> None:
        """Begin with none; at most ``kept_bytes`` are kept."""
        self._embeddings = embeddings
        num_kept = min(max(1, kept_bytes // (4 * embeddings.embedding_dim)), embeddings.num_embeddings)
        self._kept: FloatArray = np.empty((num_kept, embeddings.embedding_dim), np.float32)
        self._place_of: dict[int, int] = {}  # by token

    def of(self, token_ids: Sequence[int]) -> FloatArray:
        """Return the rows of tokens [n], [n, D]."""
        places = self._place_of
        new_ids = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in places]
        if len(places) + len(new_ids) > len(self._kept):
            places.clear()
            new_ids = list(dict.fromkeys(token_ids))
            if len(new_ids) > len(self._kept):
                return self._read(token_ids)
        if new_ids:
            first = len(places)
            self._kept[first : first + len(new_ids)] = self._read(new_ids)
            places.update((token_id, first + i) for i, token_id in enumerate(new_ids))
        return self._kept[[places[token_id] for token_id in token_ids]]

    def _read(self, token_ids: Sequence[int]) -> FloatArray:
        rows: FloatArray = embedded(self._embeddings, torch.tensor(token_ids)).float().numpy()
        return rows


def embedded(embeddings: nn.Embedding | BlockEmbedding, token_ids: Tensor) -> Tensor:
    """Return the rows of tokens [n] as they are stored, [n, D]: some models' own modules scale them."""
    if isinstance(embeddings, BlockEmbedding):
        rows: Tensor = embeddings(token_ids)
        return rows
    return embeddings.weight.detach().index_select(0, token_ids)


def has_blocks(model: LoadedModel) -> bool:
    """Return whether some weights of a model are blocks, which only the machine code can multiply by."""
    return any(isinstance(module, BlockLinear | BlockEmbedding) for module in model.modules())


def block_bytes(model: nn.Module) -> int:
    """Return the bytes of all blocks of a model; 0 if it has none."""
    return sum(one.data.numel() for one in model.modules() if isinstance(one, BlockLinear | BlockEmbedding))
