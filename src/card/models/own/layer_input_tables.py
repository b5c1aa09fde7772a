"""Numbers that tokens have for each layer, as the machine code makes and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from card.kernels.machine_code import machine_code
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

    def __init__(self, model: DecoderModel, its: LayerInputs, pack: Pack) -> None:
        """Pack the projection; rows of the table are read as passes need them."""
        self._code = machine_code("tables")
        self._num_layers, self._width = len(model.layers), its.width
        self.padded_width = padded(its.width, GROUP)
        self._rows = EmbeddedRows(its.table)
        self._scale = np.float32(np.array(its.width**0.5).astype(model.dtype)) * np.float32(_HALF_EACH)
        self._projection = self._packed(its.projection, pack, float(model.config.hidden_size) ** -0.5)
        weight = norm_weight(its.norm, model.architecture.norm_offset) * np.float32(_HALF_EACH)
        self._norm = extended(weight, self.padded_width)
        self._tokens: Floats = zeros((0, 0, 0))

    def _packed(self, linear: Linear, pack: Pack, factor: float) -> PackedLinear:
        """Return the layer whose outputs are those of all layers, each followed by zeros up to whole groups."""
        if isinstance(linear.weight, BlockWeight):
            return packed(pack, linear, factor=factor)
        return packed(
            pack, Linear(with_padded_heads(linear.weight, self._num_layers, 0, self.padded_width)), factor=factor
        )

    def make_room(self, num_rows: int) -> dict[int, Array]:
        """Return buffers for so many rows, by their places in the table of a pass."""
        size = num_rows, self._num_layers, self.padded_width
        self._tokens = zeros(size)
        return {
            self._code.TOKEN_INPUTS: self._tokens,
            self._code.LAYER_INPUTS: empty(size),
            self._code.OWN_NORM: self._norm,
        }

    def fill(self, table: Any) -> None:
        """Write into the table of a pass what is the same in all of them."""
        code = self._code
        table[code.OWN_WIDTH], table[code.PADDED_OWN_WIDTH] = self._width, self.padded_width
        table[code.INPUT_PROJECTION : code.INPUT_PROJECTION + code.LINEAR_SIZE] = self._projection.entry

    def take(self, token_ids: Sequence[int]) -> None:
        """Look up the numbers of a pass's tokens."""
        rows = self._rows.of(token_ids).reshape(len(token_ids), self._num_layers, self._width)
        np.multiply(rows, self._scale, out=self._tokens[: len(token_ids), :, : self._width])


@dataclass(frozen=True, slots=True)
class OwnInputTable:
    """The table of what a layer does with its numbers."""

    entries: IntArray
    held: Any  # what the entries hold addresses of


def factor_at(factor: Floats) -> int:
    """Return where a factor lies; 0 if it changes nothing."""
    return 0 if factor == 1 else int(factor.ctypes.data)


def own_input_table(
    architecture: Architecture, idx: int, layer: DecoderLayer, pack: Pack, factor: Floats, width: int
) -> OwnInputTable | None:
    """Return the table of a layer, whose hidden states are times a factor [1] then; None if tokens have none for it."""
    if layer.shape.input_width == 0:
        return None
    code = machine_code("tables")
    gate, out = (layer.linears[architecture.input_parts[place].name] for place in ("gate", "out"))
    placed = {code.INPUT_GATE: gate, code.INPUT_OUT: out}
    linears = {place: packed(pack, linear, out_multiple=GROUP) for place, linear in placed.items()}
    weight = norm_weight(layer.norms[architecture.norms["input_out"].name], architecture.norm_offset)
    norm = extended(weight, padded(width, GROUP))
    entries = np.zeros(code.OWN_INPUT_SIZE, np.int64)
    for place, linear in linears.items():
        entries[place : place + code.LINEAR_SIZE] = linear.entry
    entries[code.INPUT_OUT_NORM] = norm.ctypes.data
    entries[code.INPUT_FACTOR] = factor_at(factor)
    entries[code.INPUT_AT] = 4 * padded(layer.shape.input_width, GROUP) * idx
    return OwnInputTable(entries, (linears, norm))
