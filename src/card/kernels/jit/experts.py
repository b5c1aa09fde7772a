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
from card.kernels.jit.rows import ZERO, Activations, Output, multiply_tile, scales_behind, sums_behind, tile_size
from card.kernels.jit.sharing import Work, share, shares_rows, wait
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
def count_read(table: PassTable, experts: ExpertTable, starts: int) -> None:
    """Add the experts that some row has chosen to those that a pass has read."""
    read = table.experts_read
    for expert_idx in range(experts.num_experts):
        read += int(rows_of(starts, expert_idx) > 0)
    store_int(table + 8 * PassTable.experts_read, read)


@compiled
def gated_sums(table: PassTable, before: int) -> int:
    """Return where sums lie of what gates give, ``before`` groups of rows behind the first."""
    return table.gated_sums + (SUMS_BYTES + 4 * GROUP) * before


@compiled
def gate_expert(
    table: PassTable, experts: ExpertTable, expert: ExpertEntry, slots: int, rows: int, first: int, last: int,
    before: int, scratch: int,
) -> None:  # fmt: skip
    """Compute groups ``first`` to ``last`` of an expert's gate for its rows.

    Args:
        expert: its entry.
        before: groups of rows of the experts before it.
    """
    num_groups, num_out = table.padded_width // GROUP, expert.num_groups
    gate, up = expert.gate, expert.up
    tile, room, done = tile_at(table, experts, scratch), room_at(table, experts, scratch), 0
    while done < rows:
        count, behind = min(rows - done, TOGETHER), before + done * num_out
        takes = gate.takes | up.takes
        numbers = gathered(slots + SLOT_BYTES * done, count, takes, num_groups, tile)
        scales = scales_behind(numbers, count, num_groups)
        for group in range(first, last):
            gate_tiles(
                table, gate, up, expert.down.takes, group, num_out, count,
                Activations(numbers, scales, sums_behind(scales, count, num_groups)), room,
                Activations(
                    table.gated + GROUP * behind, table.gated_scales + 4 * behind, gated_sums(table, behind)
                ), 0,
            )  # fmt: skip
        done += count


@compiled
def group_cost(rows: int) -> int:
    """Return what a group of channels of an expert costs, with so many rows."""
    return rows + _READING if rows else 0


@compiled
def whole_cost(experts: ExpertTable, starts: int) -> int:
    """Return what all gates cost."""
    cost = 0
    for expert_idx in range(num_listed(experts)):
        cost += group_cost(rows_of(starts, expert_idx)) * expert_entry(experts, expert_idx).num_groups
    return cost


@compiled
def gate_experts(table: PassTable, experts: ExpertTable, thread: int, scratch: int) -> None:
    """Compute a thread's part of all gates: groups of channels, one expert after the other, at the cost of others'."""
    threads, starts, slots = table.num_threads, starts_at(table, experts, scratch), slots_at(table, experts, scratch)
    whole, cost, before = whole_cost(experts, starts), 0, 0
    start, stop = share(whole, thread, threads), share(whole, thread + 1, threads)
    for expert_idx in range(num_listed(experts)):
        rows, expert = rows_of(starts, expert_idx), expert_entry(experts, expert_idx)
        if rows == 0:
            continue
        num_out, each = expert.num_groups, group_cost(rows)
        first = min(max((start - cost + each - 1) // each, 0), num_out)
        last = min(max((stop - cost + each - 1) // each, 0), num_out)
        if first < last:
            place = slots + SLOT_BYTES * load_int(starts + 8 * expert_idx)
            gate_expert(table, experts, expert, place, rows, first, last, before, scratch)
        cost += each * num_out
        before += rows * num_out


@compiled
def add_expert(
    table: PassTable, experts: ExpertTable, expert: ExpertEntry, slots: int, rows: int, start: int, stop: int,
    before: int, scratch: int, to: int,
) -> None:  # fmt: skip
    """Add output panels ``start`` to ``stop`` of an expert to its rows of ``to``, times weights; see `gate_expert`."""
    padded, num_groups, room = table.padded_width, expert.num_groups, room_at(table, experts, scratch)
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
                    expert.down, count, first, size, panel, end, 0,
                    Activations(
                        table.gated + GROUP * behind, table.gated_scales + 4 * behind, gated_sums(table, behind)
                    ),
                    num_groups, Output(room - 4 * PANEL * panel, out_bytes, 0),
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
def add_experts(table: PassTable, experts: ExpertTable, thread: int, scratch: int) -> None:
    """Add a thread's channels of what all experts give to the hidden states, or to zeros beside an MLP."""
    threads, panels, before = table.num_threads, table.padded_width // PANEL, 0
    starts, slots, to = starts_at(table, experts, scratch), slots_at(table, experts, scratch), table.hidden
    start, stop = share(panels, thread, threads), share(panels, thread + 1, threads)
    if experts.output_norm:
        to = table.expert_sums
        for row in range(table.num_rows):
            its_sums = to + 4 * PANEL * panels * row
            for at in range(its_sums + 4 * PANEL * start, its_sums + 4 * PANEL * stop, 4 * LANES):
                store(at, fill(ZERO))
    for expert_idx in range(num_listed(experts)):
        rows, expert = rows_of(starts, expert_idx), expert_entry(experts, expert_idx)
        if rows:
            place = slots + SLOT_BYTES * load_int(starts + 8 * expert_idx)
            add_expert(table, experts, expert, place, rows, start, stop, before, scratch, to)
            before += rows * expert.num_groups


@separated
def run_experts(
    code: int, table: PassTable, layer: LayerTable, work: Work, thread: int, turn: int, scratch: int
) -> int:
    """Do a thread's part of a layer's experts; return the next turn.

    Args:
        code: address of this function.
        layer: table of the layer.
        work: the rows that the thread prepares, all of them or its own.
    """
    experts, barrier, threads = layer.experts, table.barrier, table.num_threads
    norm = experts.input_norm if experts.input_norm else layer.mlp_norm
    turn = route(table, experts, norm, work, turn, scratch)
    if shares_rows(table):
        turn = wait(barrier, threads, turn)
    sort_rows(table, experts, scratch)
    if thread == 0:
        count_read(table, experts, starts_at(table, experts, scratch))
    gate_experts(table, experts, thread, scratch)
    turn = wait(barrier, threads, turn)
    add_experts(table, experts, thread, scratch)
    return wait(barrier, threads, turn)
