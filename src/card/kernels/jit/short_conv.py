"""Gated short convolution: what a row takes in is summed, channel by channel, with what its last ancestors took in.

Of B, C and u, three projections of a row, B * u is what it takes in: its *record*, which the cache holds for those rows
that later ones may hang below. A row's sum goes through its own ancestors from the oldest on, wherever these are, so
neither the rows beside it nor their number changes a bit. Each thread has channels of its own.
"""

from __future__ import annotations

from card.kernels.jit.addresses import all_heads, attended_bytes, conv_entry, layer_entry, sources_of
from card.kernels.jit.rows import ZERO
from card.kernels.jit.tables import LayerTable, PassTable
from card.kernels.jit.vectors import LANES, compiled, fill, fma, load, load_int, store, times


@compiled
def taken_at(table: PassTable, layer: LayerTable, source: int) -> int:
    """Return where a row's record lies in a layer: in this pass or in the cache; 0 before the text."""
    if source < 0:  # row -1 - source of this pass, where B was
        return table.projected - 4 * layer.padded_head * all_heads(layer) * (source + 1)
    return source + layer.record_at if source else 0


@compiled
def take_in(table: PassTable, layer: LayerTable, first: int, last: int) -> None:
    """Write the records of all rows, bytes ``first`` to ``last``, where B was."""
    width = 4 * layer.padded_head * layer.heads
    for row in range(table.num_rows):
        inputs = table.projected + 3 * width * row
        for at in range(inputs + first, inputs + last, 4 * LANES):
            store(at, times(load(at), load(at + 2 * width)))


@compiled
def sum_row(table: PassTable, layer: LayerTable, row: int, first: int, last: int) -> None:
    """Write C times the sum over a row's ancestors and itself, bytes ``first`` to ``last``."""
    width, num_taps = 4 * layer.padded_head * layer.heads, layer.num_taps
    inputs, out = table.projected + 3 * width * row, table.attended + attended_bytes(layer) * row
    sources = sources_of(table, row)
    for at in range(first, last, 4 * LANES):
        sums = fill(ZERO)
        for tap in range(num_taps - 1):
            taken = taken_at(table, layer, load_int(sources + 8 * tap))
            if taken:
                sums = fma(load(layer.filter + width * tap + at), load(taken + at), sums)
        sums = fma(load(layer.filter + width * (num_taps - 1) + at), load(inputs + at), sums)
        store(out + at, times(sums, load(inputs + width + at)))


@compiled
def keep_record(table: PassTable, layer: LayerTable, row: int, place: int, first: int, last: int) -> None:
    """Copy bytes ``first`` to ``last`` of a row's record to the cache, if it has a place there."""
    if place:
        source, out = taken_at(table, layer, -1 - row), place + layer.record_at
        for at in range(first, last, 4 * LANES):
            store(out + at, load(source + at))


@compiled
def convolve_part(table: PassTable, layer_idx: int, thread: int) -> None:
    """Do a thread's part of the convolution of all rows."""
    layer, threads, num_rows = layer_entry(table, layer_idx), table.num_threads, table.num_rows
    heads, head_bytes = layer.heads, 4 * layer.padded_head
    first, last = head_bytes * (heads * thread // threads), head_bytes * (heads * (thread + 1) // threads)
    take_in(table, layer, first, last)
    for row in range(num_rows):
        sum_row(table, layer, row, first, last)
    for row in range(num_rows):  # only now: rows that were read may lie there
        conv = conv_entry(table, row)
        keep_record(table, layer, row, conv.recent, first, last)
        keep_record(table, layer, row, conv.landmark, first, last)
        if thread == threads - 1:  # zeros behind the last channel: another layer may have had numbers there
            for at in range(last, attended_bytes(layer), 4 * LANES):
                store(table.attended + attended_bytes(layer) * row + at, fill(ZERO))
