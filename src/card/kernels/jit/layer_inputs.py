"""Numbers that tokens have for each layer: what embeddings add to them, and their gate in a layer.

A row's numbers lie beside each other, those of each layer in whole groups. They are used once, so that a gate leaves
what it makes of them in their place.
"""

from __future__ import annotations

from card.kernels.jit.gates import activate, prepare_input
from card.kernels.jit.rows import (
    Activations,
    Output,
    add_row,
    multiply_tile,
    project,
    rms_norm,
    room_behind,
    scales_behind,
    sums_behind,
    tile_size,
)
from card.kernels.jit.sharing import Work, share
from card.kernels.jit.tables import LayerInputTable, PassTable
from card.kernels.jit.tiles import PANEL
from card.kernels.jit.vectors import GROUP, LANES, compiled, copy_group


@compiled
def layer_inputs_bytes(table: PassTable) -> int:
    """Return the bytes of a row of all layers' numbers."""
    return 4 * table.padded_input_width * table.num_layers


@compiled
def layer_input_at(table: PassTable, layer_input: LayerInputTable, row: int) -> int:
    """Return where a row's numbers for a layer lie."""
    return table.layer_inputs + layer_inputs_bytes(table) * row + layer_input.offset


@compiled
def make_layer_inputs(table: PassTable, work: Work, scratch: int) -> None:
    """Make a part of the layers' numbers of some rows: those of the tokens, and normed ones of their embeddings."""
    size, padded, row_bytes = table.input_width, table.padded_input_width, layer_inputs_bytes(table)
    linear, groups = table.input_projection, table.padded_width // GROUP
    scales = scales_behind(scratch, work.num_rows, groups)
    sums = sums_behind(scales, work.num_rows, groups)
    prepare_input(table, linear.takes, 0, work.first_row, work.num_rows, Activations(scratch, scales, sums))
    first, last = share(table.num_layers, work.part, work.parts), share(table.num_layers, work.part + 1, work.parts)
    out, panels = table.layer_inputs + row_bytes * work.first_row, padded // PANEL
    project(
        linear,
        work.num_rows,
        panels * first,
        panels * last,
        Activations(scratch, scales, sums),
        groups,
        Output(out, row_bytes, 0),
        room_behind(sums, work.num_rows, groups),
    )
    tokens = table.token_inputs + row_bytes * work.first_row
    for row in range(work.num_rows):
        for at in range(row_bytes * row + 4 * padded * first, row_bytes * row + 4 * padded * last, 4 * padded):
            rms_norm(out + at, table.input_norm, out + at, size, padded, table.eps)
            add_row(tokens + at, out + at, padded)


@compiled
def gate_layer_input(table: PassTable, layer_input: LayerInputTable, work: Work, scratch: int) -> None:
    """Turn a part of some rows' numbers for a layer into themselves times the activation of their gate."""
    gate, groups, row_bytes = layer_input.gate, table.padded_width // GROUP, layer_inputs_bytes(table)
    scales = scales_behind(scratch, work.num_rows, groups)
    sums = sums_behind(scales, work.num_rows, groups)
    prepare_input(table, gate.takes, 0, work.first_row, work.num_rows, Activations(scratch, scales, sums))
    room, num_panels, num_out = (
        room_behind(sums, work.num_rows, groups),
        GROUP // PANEL,
        table.padded_input_width // GROUP,
    )
    for group in range(share(num_out, work.part, work.parts), share(num_out, work.part + 1, work.parts)):
        numbers, first = layer_input_at(table, layer_input, work.first_row) + 4 * GROUP * group, 0
        while first < work.num_rows:
            size = tile_size(work.num_rows, first)
            multiply_tile(
                gate, work.num_rows, first, size, num_panels * group, num_panels * (group + 1), 0,
                Activations(scratch, scales, sums), groups,
                Output(room - 4 * GROUP * group, 4 * GROUP, 0),
            )  # fmt: skip
            for row in range(size):
                x, factor = room + 4 * GROUP * row, numbers + row_bytes * (first + row)
                activate(x, factor, table.activation)
                copy_group(x, factor, 4 * LANES)
            first += size
