"""Gated short convolution: what a row takes in is summed, channel by channel, with what its last ancestors took in.

Of B, C and u, three projections of a row, B * u is what it takes in: its *record*, which the cache holds for those rows
that later ones may hang below. A row's sum goes through its own ancestors from the oldest on, wherever these are, so
neither the rows beside it nor their number changes a bit. Each thread has channels of its own.
"""

from __future__ import annotations

from card.kernels.jit.addresses import all_heads, attended_bytes, input_entry, layer_entry, sources_of
from card.kernels.jit.rows import ZERO
from card.kernels.jit.tables import LayerTable, PassTable
from card.kernels.jit.vectors import LANES, compiled, fill, fma, load, load_int, store, times


@compiled
def taken_at(table: PassTable, of: LayerTable, source: int) -> int:
    """Return where a row's record lies in a layer: in this pass or in the cache; 0 before the text."""
    if source < 0:  # row -1 - source of this pass, where B was
        return table.projected - 4 * of.padded_head * all_heads(of) * (source + 1)
    return source + of.record_at if source else 0


@compiled
def take_in(table: PassTable, of: LayerTable, first: int, last: int) -> None:
    """Write the records of all rows, bytes ``first`` to ``last``, where B was."""
    width = 4 * of.padded_head * of.heads
    for row in range(table.num_rows):
        its = table.projected + 3 * width * row
        for at in range(its + first, its + last, 4 * LANES):
            store(at, times(load(at), load(at + 2 * width)))


@compiled
def sum_row(table: PassTable, of: LayerTable, row: int, first: int, last: int) -> None:
    """Write C times the sum over a row's ancestors and itself, bytes ``first`` to ``last``."""
    width, num_taps = 4 * of.padded_head * of.heads, of.num_taps
    its, out = table.projected + 3 * width * row, table.attended + attended_bytes(of) * row
    sources = sources_of(table, row)
    for at in range(first, last, 4 * LANES):
        sums = fill(ZERO)
        for tap in range(num_taps - 1):
            taken = taken_at(table, of, load_int(sources + 8 * tap))
            if taken:
                sums = fma(load(of.filter + width * tap + at), load(taken + at), sums)
        sums = fma(load(of.filter + width * (num_taps - 1) + at), load(its + at), sums)
        store(out + at, times(sums, load(its + width + at)))


@compiled
def keep_record(table: PassTable, of: LayerTable, row: int, place: int, first: int, last: int) -> None:
    """Copy bytes ``first`` to ``last`` of a row's record to the cache, if it has a place there."""
    if place:
        source, out = taken_at(table, of, -1 - row), place + of.record_at
        for at in range(first, last, 4 * LANES):
            store(out + at, load(source + at))


@compiled
def convolve_part(table: PassTable, layer: int, thread: int) -> None:
    """Do a thread's part of the convolution of all rows."""
    of, threads, num_rows = layer_entry(table, layer), table.num_threads, table.num_rows
    heads, head_bytes = of.heads, 4 * of.padded_head
    first, last = head_bytes * (heads * thread // threads), head_bytes * (heads * (thread + 1) // threads)
    take_in(table, of, first, last)
    for row in range(num_rows):
        sum_row(table, of, row, first, last)
    for row in range(num_rows):  # only now: rows that were read may lie there
        its = input_entry(table, row)
        keep_record(table, of, row, its.recent, first, last)
        keep_record(table, of, row, its.landmark, first, last)
        if thread == threads - 1:  # zeros behind the last channel: another layer may have had numbers there
            for at in range(last, attended_bytes(of), 4 * LANES):
                store(table.attended + attended_bytes(of) * row + at, fill(ZERO))
