"""Parts of MLPs, of layers and of experts: their input, and their gate."""

from __future__ import annotations

from card.kernels.jit import tables as t
from card.kernels.jit.rows import (
    Activations,
    Output,
    clamped_gate,
    expanded_panels,
    floats_behind,
    gelu,
    multiply_tile,
    prepare_group,
    prepare_rows,
    silu,
    tile_size,
)
from card.kernels.jit.tables import LinearEntry, PassTable
from card.kernels.jit.tiles import MOST_ROWS, PANEL
from card.kernels.jit.vectors import GROUP, LANES, compiled, load, store, times


@compiled
def prepare_input(table: PassTable, takes: int, norm: int, first_row: int, num_rows: int, inputs: Activations) -> None:
    """Prepare some rows of hidden states, normed."""
    width, padded = table.width, table.padded_width
    prepare_rows(
        takes, table.hidden + 4 * padded * first_row, 4 * padded, num_rows, width, norm,
        table.centres, padded // GROUP, table.eps, inputs, 0,
    )  # fmt: skip


@compiled
def activate(x: int, factor: int, activation: int) -> None:
    """Turn a group of the gate into its activation times the group ``factor``, in place."""
    if activation == t.GELU:
        for at in range(0, 4 * GROUP, 4 * LANES):
            store(x + at, times(gelu(load(x + at)), load(factor + at)))
    elif activation == t.CLAMPED:
        for at in range(0, 4 * GROUP, 4 * LANES):
            store(x + at, clamped_gate(load(x + at), load(factor + at)))
    else:
        for at in range(0, 4 * GROUP, 4 * LANES):
            store(x + at, times(silu(load(x + at)), load(factor + at)))


@compiled
def gate_tiles(
    table: PassTable, gate: LinearEntry, up: LinearEntry, takes: int, group: int, num_out: int, num_rows: int,
    inputs: Activations, room: int, out: Activations, panels_room: int,
) -> None:  # fmt: skip
    """Compute a group of activation(gate) * up for some rows, and prepare it.

    Args:
        gate, up: entries of the linear layers.
        takes: what the layer behind them takes.
        num_out: groups of channels that they have.
        room: for 8 * GROUP * MOST_ROWS bytes.
        panels_room: for 2 * GROUP / PANEL expanded panels; 0: there is none.
    """
    num_groups, num_panels = table.padded_width // GROUP, GROUP // PANEL
    activation, other = table.activation, room + 4 * GROUP * MOST_ROWS
    floats_out = floats_behind(out.sums, num_rows, num_out)
    start, stop, first = num_panels * group, num_panels * (group + 1), 0
    expanded_gate = expanded_panels(gate, num_rows, start, stop, num_groups, panels_room)
    if panels_room:
        panels_room += num_panels * num_groups * gate.expanded_bytes
    expanded_up = expanded_panels(up, num_rows, start, stop, num_groups, panels_room)
    while first < num_rows:
        size = tile_size(num_rows, first)
        for linear, products, expanded in ((gate, room, expanded_gate), (up, other, expanded_up)):
            multiply_tile(
                linear, num_rows, first, size, start, stop, expanded, inputs, num_groups,
                Output(products - 4 * GROUP * group, 4 * GROUP, 0),
            )  # fmt: skip
        for row in range(size):
            activate(room + 4 * GROUP * row, other + 4 * GROUP * row, activation)
            prepare_group(takes, room + 4 * GROUP * row, first * num_out + group * size, row, size, out, floats_out)
        first += size
