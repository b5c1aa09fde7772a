"""Numbers that tokens have for each layer, as the machine code makes and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from card.kernels.jit.tables import LayerInputTable, PassTable
from card.kernels.number_types import Array, Floats, empty, zeros
from card.kernels.packed_linear import GROUP, PackedLinear, extended, padded
from card.models.architectures import Architecture
from card.models.own.decoder_model import DecoderLayer, DecoderModel
from card.models.own.exact_layers import Pack, norm_weight, packed, with_padded_heads
from card.models.own.exact_rows import IntArray
from card.models.own.layer_inputs import LayerInputs
from card.models.own.layers import BlockWeight, EmbeddedRows, Linear

_HALF_EACH = 0.5**0.5  # of the sum of what tokens have and what their embeddings add


class LayerInputTables:
    """The table of such numbers, and the packed projection of embeddings that adds to them."""

    def __init__(self, model: DecoderModel, layer_inputs: LayerInputs, pack: Pack) -> None:
        """Pack the projection; rows of the table are read as passes need them."""
        self._num_layers, self._width = len(model.layers), layer_inputs.width
        self.padded_width = padded(layer_inputs.width, GROUP)
        self._rows = EmbeddedRows(layer_inputs.table)
        self._scale = np.float32(np.array(layer_inputs.width**0.5).astype(model.dtype)) * np.float32(_HALF_EACH)
        self._projection = self._packed(layer_inputs.projection, pack, float(model.config.hidden_size) ** -0.5)
        weight = norm_weight(layer_inputs.norm, model.architecture.norm_offset) * np.float32(_HALF_EACH)
        self._norm = extended(weight, self.padded_width)
        self._tokens: Floats = zeros((0, 0, 0))

    def _packed(self, linear: Linear, pack: Pack, factor: float) -> PackedLinear:
        """Return the layer whose outputs are those of all layers, each followed by zeros up to whole groups."""
        if isinstance(linear.weight, BlockWeight):
            return packed(pack, linear, factor=factor)
        return packed(
            pack, Linear(with_padded_heads(linear.weight, self._num_layers, 0, self.padded_width)), factor=factor
        )

    def make_room(self, num_rows: int) -> dict[str, Array]:
        """Return buffers for so many rows, by their names in the table of a pass."""
        size = num_rows, self._num_layers, self.padded_width
        self._tokens = zeros(size)
        return {"token_inputs": self._tokens, "layer_inputs": empty(size), "input_norm": self._norm}

    def fill(self, table: Any) -> None:
        """Write into the table of a pass what is the same in all of them."""
        widths = {"input_width": self._width, "padded_input_width": self.padded_width}
        PassTable.write(table, {**widths, "input_projection": self._projection})

    def take(self, token_ids: Sequence[int]) -> None:
        """Look up the numbers of a pass's tokens."""
        rows = self._rows.of(token_ids).reshape(len(token_ids), self._num_layers, self._width)
        np.multiply(rows, self._scale, out=self._tokens[: len(token_ids), :, : self._width])


def factor_at(factor: Floats) -> int:
    """Return where a factor lies; 0 if it changes nothing."""
    return 0 if factor == 1 else int(factor.ctypes.data)


def layer_input_table(
    architecture: Architecture, idx: int, layer: DecoderLayer, pack: Pack, factor: Floats, width: int
) -> tuple[IntArray, Any] | None:
    """Return the table of a layer, whose hidden states are times a factor [1] then, and what it has addresses of.

    Returns: None if tokens have no numbers for the layer.
    """
    if layer.shape.input_width == 0:
        return None
    stored = {place: layer.linears[architecture.input_parts[place].name] for place in ("gate", "out")}
    linears = {place: packed(pack, linear, out_multiple=GROUP) for place, linear in stored.items()}
    weight = norm_weight(layer.norms[architecture.norms["input_out"].name], architecture.norm_offset)
    norm = extended(weight, padded(width, GROUP))
    offset = 4 * padded(layer.shape.input_width, GROUP) * idx
    table = LayerInputTable.pack({**linears, "norm": norm, "factor": factor_at(factor), "offset": offset})
    return table, (linears, norm)
