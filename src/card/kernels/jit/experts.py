"""Experts of a layer: each is read once for all rows that take it.

A thread owns channels of the hidden states, goes through the experts in their order, and adds to each row what that
expert gives it, times the row's own weight. So a row's sums have the order of its own experts, whatever rows the others
take.

Each thread prepares and routes rows as it does for a plain MLP: all of them, or its own ones where rows are shared out.
From there on the threads share out experts and channels.
"""

from __future__ import annotations

from card.kernels.jit.expert_rows import (
    DOWN_PANELS,
    SLOT_BYTES,
    TOGETHER,
    expert_entry,
    gathered,
    num_listed,
    room_at,
    rows_of,
    slots_at,
    starts_at,
    tile_at,
)
from card.kernels.jit.gates import gate_tiles
from card.kernels.jit.routing import route, sort_rows
from card.kernels.jit.rows import ZERO, multiply_tile, scales_behind, sums_behind, tile_size
from card.kernels.jit.sharing import share, shares_rows, wait
from card.kernels.jit.tables import ExpertEntry, ExpertTable, LayerTable, PassTable
from card.kernels.jit.tiles import MOST_ROWS, PANEL
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    SUMS_BYTES,
    compiled,
    fill,
    fma,
    load,
    load_float,
    load_int,
    separated,
    store,
    store_int,
)

_READING = 4  # rows whose products take as long as to read the weights, of a group of channels


@compiled
def count_read(table: PassTable, of: ExpertTable, starts: int) -> None:
    """Add the experts that some row has chosen to those that a pass has read."""
    read = table.experts_read
    for expert in range(of.num_experts):
        read += int(rows_of(starts, expert) > 0)
    store_int(table + 8 * PassTable.experts_read, read)


@compiled
def gated_sums(table: PassTable, before: int) -> int:
    """Return where sums lie of what gates give, ``before`` groups of rows behind the first."""
    return table.gated_sums + (SUMS_BYTES + 4 * GROUP) * before


@compiled
def gate_expert(
    table: PassTable, of: ExpertTable, its: ExpertEntry, slots: int, rows: int, first: int, last: int, before: int, own:
    int,
) -> None:  # fmt: skip
    """Compute groups ``first`` to ``last`` of an expert's gate for its rows.

    Args:
        its: entry of the expert.
        before: groups of rows of the experts before it.
    """
    num_groups, num_out = table.padded_width // GROUP, its.num_groups
    gate, up = its.gate, its.up
    tile, room, done = tile_at(table, of, own), room_at(table, of, own), 0
    while done < rows:
        count, behind = min(rows - done, TOGETHER), before + done * num_out
        takes = gate.takes | up.takes
        numbers = gathered(slots + SLOT_BYTES * done, count, takes, num_groups, tile)
        scales = scales_behind(numbers, count, num_groups)
        for group in range(first, last):
            gate_tiles(
                table, gate, up, its.down.takes, group, num_out, count, numbers, scales,
                sums_behind(scales, count, num_groups), room, table.gated + GROUP * behind,
                table.gated_scales + 4 * behind, gated_sums(table, behind),
            )  # fmt: skip
        done += count


@compiled
def group_cost(rows: int) -> int:
    """Return what a group of channels of an expert costs, with so many rows."""
    return rows + _READING if rows else 0


@compiled
def whole_cost(of: ExpertTable, starts: int) -> int:
    """Return what all gates cost."""
    cost = 0
    for expert in range(num_listed(of)):
        cost += group_cost(rows_of(starts, expert)) * expert_entry(of, expert).num_groups
    return cost


@compiled
def gate_experts(table: PassTable, of: ExpertTable, thread: int, own: int) -> None:
    """Compute a thread's part of all gates: groups of channels, one expert after the other, at the cost of others'."""
    threads, starts, slots = table.num_threads, starts_at(table, of, own), slots_at(table, of, own)
    whole, cost, before = whole_cost(of, starts), 0, 0
    start, stop = share(whole, thread, threads), share(whole, thread + 1, threads)
    for expert in range(num_listed(of)):
        rows, its = rows_of(starts, expert), expert_entry(of, expert)
        if rows == 0:
            continue
        num_out, each = its.num_groups, group_cost(rows)
        first = min(max((start - cost + each - 1) // each, 0), num_out)
        last = min(max((stop - cost + each - 1) // each, 0), num_out)
        if first < last:
            place = slots + SLOT_BYTES * load_int(starts + 8 * expert)
            gate_expert(table, of, its, place, rows, first, last, before, own)
        cost += each * num_out
        before += rows * num_out


@compiled
def add_expert(
    table: PassTable, of: ExpertTable, its: ExpertEntry, slots: int, rows: int, start: int, stop: int, before: int, own:
    int, to: int,
) -> None:  # fmt: skip
    """Add output panels ``start`` to ``stop`` of an expert to its rows of ``to``, times weights; see `gate_expert`."""
    padded, num_groups, room = table.padded_width, its.num_groups, room_at(table, of, own)
    out_bytes, done = 4 * PANEL * DOWN_PANELS, 0
    while done < rows:
        count, behind = min(rows - done, TOGETHER), before + done * num_groups
        # Few enough to stay in the core's cache for the next tile.
        step = DOWN_PANELS if count <= MOST_ROWS else GROUP // PANEL
        for panel in range(start, stop, step):
            end, first = min(panel + step, stop), 0
            while first < count:
                size = tile_size(count, first)
                multiply_tile(
                    its.down, count, first, size, panel, end, table.gated + GROUP * behind,
                    table.gated_scales + 4 * behind, gated_sums(table, behind), num_groups,
                    room - 4 * PANEL * panel, out_bytes, 0,
                )  # fmt: skip
                for row in range(size):
                    slot = slots + SLOT_BYTES * (done + first + row)
                    weight, source = fill(load_float(slot + 16)), room + out_bytes * row
                    hidden = to + 4 * padded * load_int(slot + 8) + 4 * PANEL * panel
                    for at in range(0, 4 * PANEL * (end - panel), 4 * LANES):
                        store(hidden + at, fma(weight, load(source + at), load(hidden + at)))
                first += size
        done += count


@compiled
def add_experts(table: PassTable, of: ExpertTable, thread: int, own: int) -> None:
    """Add a thread's channels of what all experts give to the hidden states, or to zeros beside an MLP."""
    threads, panels, before = table.num_threads, table.padded_width // PANEL, 0
    starts, slots, to = starts_at(table, of, own), slots_at(table, of, own), table.hidden
    start, stop = share(panels, thread, threads), share(panels, thread + 1, threads)
    if of.output_norm:
        to = table.expert_sums
        for row in range(table.num_rows):
            its_sums = to + 4 * PANEL * panels * row
            for at in range(its_sums + 4 * PANEL * start, its_sums + 4 * PANEL * stop, 4 * LANES):
                store(at, fill(ZERO))
    for expert in range(num_listed(of)):
        rows, its = rows_of(starts, expert), expert_entry(of, expert)
        if rows:
            place = slots + SLOT_BYTES * load_int(starts + 8 * expert)
            add_expert(table, of, its, place, rows, start, stop, before, own, to)
            before += rows * its.num_groups


@separated
def run_experts(
    code: int, table: PassTable, layer: LayerTable, first_row: int, num_rows: int, part: int, parts: int, thread: int,
    turn: int, own: int,
) -> int:  # fmt: skip
    """Do a thread's part of a layer's experts; return the next turn.

    Args:
        code: address of this function.
        layer: table of the layer.
        first_row, num_rows: the rows that the thread prepares, all of them or its own.
    """
    of, barrier, threads = layer.experts, table.barrier, table.num_threads
    norm = of.input_norm if of.input_norm else layer.mlp_norm
    turn = route(table, of, norm, first_row, num_rows, part, parts, turn, own)
    if shares_rows(table):
        turn = wait(barrier, threads, turn)
    sort_rows(table, of, own)
    if thread == 0:
        count_read(table, of, starts_at(table, of, own))
    gate_experts(table, of, thread, own)
    turn = wait(barrier, threads, turn)
    add_experts(table, of, thread, own)
    return wait(barrier, threads, turn)
