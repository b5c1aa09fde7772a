"""Numbers that tokens have for each layer: what embeddings add to them, and their gate in a layer.

A row's numbers lie beside each other, those of each layer in whole groups. They are used once, so that a gate leaves
what it makes of them in their place.
"""

from __future__ import annotations

from card.kernels.jit.gates import activate, prepare_input
from card.kernels.jit.rows import (
    add_row,
    multiply_tile,
    project,
    rms_norm,
    room_behind,
    scales_behind,
    sums_behind,
    tile_size,
)
from card.kernels.jit.sharing import share
from card.kernels.jit.tables import LayerInputTable, PassTable
from card.kernels.jit.tiles import PANEL
from card.kernels.jit.vectors import GROUP, LANES, compiled, copy_group


@compiled
def layer_inputs_bytes(table: PassTable) -> int:
    """Return the bytes of a row of all layers' numbers."""
    return 4 * table.padded_input_width * table.num_layers


@compiled
def own_input(table: PassTable, its: LayerInputTable, row: int) -> int:
    """Return where a row's numbers for a layer lie."""
    return table.layer_inputs + layer_inputs_bytes(table) * row + its.offset


@compiled
def make_layer_inputs(table: PassTable, first_row: int, num_rows: int, part: int, parts: int, own: int) -> None:
    """Make a part of the layers' numbers of some rows: those of the tokens, and normed ones of their embeddings."""
    size, padded, row_bytes = table.input_width, table.padded_input_width, layer_inputs_bytes(table)
    linear, groups = table.input_projection, table.padded_width // GROUP
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    prepare_input(table, linear.takes, 0, first_row, num_rows, own, scales, sums)
    first, last = share(table.num_layers, part, parts), share(table.num_layers, part + 1, parts)
    out, panels = table.layer_inputs + row_bytes * first_row, padded // PANEL
    project(linear, num_rows, panels * first, panels * last, own, scales, sums, groups, out, row_bytes, 0)
    tokens = table.token_inputs + row_bytes * first_row
    for row in range(num_rows):
        for at in range(row_bytes * row + 4 * padded * first, row_bytes * row + 4 * padded * last, 4 * padded):
            rms_norm(out + at, table.input_norm, out + at, size, padded, table.eps)
            add_row(tokens + at, out + at, padded)


@compiled
def gate_own_input(
    table: PassTable, its: LayerInputTable, first_row: int, num_rows: int, part: int, parts: int, own: int
) -> None:
    """Turn a part of some rows' numbers for a layer into themselves times the activation of their gate."""
    gate, groups, row_bytes = its.gate, table.padded_width // GROUP, layer_inputs_bytes(table)
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    prepare_input(table, gate.takes, 0, first_row, num_rows, own, scales, sums)
    room, num_panels, num_out = (
        room_behind(sums, num_rows, groups),
        GROUP // PANEL,
        table.padded_input_width // GROUP,
    )
    for group in range(share(num_out, part, parts), share(num_out, part + 1, parts)):
        numbers, first = own_input(table, its, first_row) + 4 * GROUP * group, 0
        while first < num_rows:
            size = tile_size(num_rows, first)
            multiply_tile(
                gate, num_rows, first, size, num_panels * group, num_panels * (group + 1), own, scales, sums, groups,
                room - 4 * GROUP * group, 4 * GROUP, 0,
            )  # fmt: skip
            for row in range(size):
                x, factor = room + 4 * GROUP * row, numbers + row_bytes * (first + row)
                activate(x, factor, table.activation)
                copy_group(x, factor, 4 * LANES)
            first += size
