"""Experts of a layer: a router says which of them each row takes, and each is read once for all rows that take it.

The router multiplies floats, and nothing of it is rounded to fewer bits. Of equal scores the lower expert's counts
first. The rows of an expert are put beside each other as tiles have them. A thread owns channels of the hidden states,
goes through the experts in their order, and adds to each row what that expert gives it, times the row's own weight. So
a row's sums have the order of its own experts, whatever rows the others take.

Each thread prepares rows as it does for a plain MLP: all of them, or its own ones where rows are shared out. Each row
is a record of its own then, as a tile of one row has it. From there on the threads share out experts and channels.
"""

from __future__ import annotations

from card.kernels.jit import tables as t
from card.kernels.jit.gates import gate_tiles, prepare_input
from card.kernels.jit.likeliest import find_best, sum_of_exponentials
from card.kernels.jit.rows import (
    ONE,
    ZERO,
    exponential,
    floats_behind,
    multiply_tile,
    project,
    scales_behind,
    sigmoid,
    sums_behind,
    tile_size,
)
from card.kernels.jit.sharing import holder, share, shares_rows, wait
from card.kernels.jit.tables import entry, real_entry
from card.kernels.jit.tiles import MOST_ROWS, PANEL
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    PARTS,
    SUMS_BYTES,
    add,
    compiled,
    copy_group,
    divide,
    fill,
    fma,
    largest,
    load,
    load_float,
    load_int,
    separated,
    store,
    store_float,
    store_int,
)

_TOGETHER = 4 * MOST_ROWS  # rows of an expert that lie beside each other at once: weights come from the cache for them
_READING = 4  # rows whose products take as long as to read the weights, of a group of channels
_DOWN_PANELS = 16  # output panels of few rows that are computed before they are added
_RECORD = GROUP + 4 + SUMS_BYTES + 4 * GROUP  # bytes of a group of a row: its bytes, its scale, its sums, and as floats
_CHOICE, _SLOT = 16, 24  # bytes of an expert and its weight, and of a row's record, its number and its weight
_LINE = 64


def room_for_experts(num_rows: int, num_listed: int, num_taken: int, width: int) -> int:
    """Return the bytes that a thread needs besides its records.

    Args:
        num_listed, num_taken: experts of a layer, and of a row, shared ones among them.
        width: of the hidden states, with their padding.
    """
    of_rows = (_CHOICE + _SLOT) * num_rows * num_taken + 8 * (num_listed + 2)
    choosing = _CHOICE * (num_taken + LANES) + 4 * (num_listed + LANES)
    rooms = max(8 * GROUP * MOST_ROWS, 4 * PANEL * _DOWN_PANELS * MOST_ROWS, choosing)
    return of_rows + _LINE + _RECORD * (width // GROUP) * _TOGETHER + rooms + _SLOT * _TOGETHER


@compiled
def num_taken(of: int) -> int:
    """Return how many experts a row takes, the shared one among them."""
    return entry(of, t.CHOSEN_EXPERTS) + int(entry(of, t.SHARED) != t.NO_SHARED)


@compiled
def num_listed(of: int) -> int:
    """Return how many experts there are, the shared one among them."""
    return entry(of, t.NUM_EXPERTS) + int(entry(of, t.SHARED) != t.NO_SHARED)


@compiled
def expert_entry(of: int, expert: int) -> int:
    """Return the entry of an expert."""
    return of + 8 * (t.EXPERT_LIST + t.EXPERT_SIZE * expert)


@compiled
def record_bytes(table: int) -> int:
    """Return the bytes of a row's record."""
    return _RECORD * (entry(table, t.PADDED_WIDTH) // GROUP)


@compiled
def choices_at(table: int, of: int, own: int, row: int) -> int:
    """Return where a thread keeps what one of its rows takes."""
    return own + entry(table, t.EXPERTS_AT) + _CHOICE * num_taken(of) * row


@compiled
def starts_at(table: int, of: int, own: int) -> int:
    """Return where a thread keeps, for each expert, which of the sorted rows is its first."""
    return choices_at(table, of, own, entry(table, t.ROWS))


@compiled
def slots_at(table: int, of: int, own: int) -> int:
    """Return where a thread keeps the rows sorted by their experts."""
    return starts_at(table, of, own) + 8 * (num_listed(of) + 2)


@compiled
def tile_at(table: int, of: int, own: int) -> int:
    """Return where a thread has room for rows beside each other."""
    behind = slots_at(table, of, own) + _SLOT * max(entry(table, t.ROWS) * num_taken(of), _TOGETHER)
    return (behind + _LINE - 1) // _LINE * _LINE


@compiled
def room_at(table: int, of: int, own: int) -> int:
    """Return where a thread has room for what it computes."""
    return tile_at(table, of, own) + record_bytes(table) * _TOGETHER


# ---- rows beside each other -----------------------------------------------------------------------------------------


@compiled
def gather_row(
    record: int, takes: int, num_groups: int, count: int, first: int, size: int, place: int, tile: int
) -> None:  # fmt: skip
    """Copy a row to its place among ``count`` rows, in the tile of ``size`` rows that begins with row ``first``."""
    its_scales = scales_behind(record, 1, num_groups)
    its_sums = sums_behind(its_scales, 1, num_groups)
    its_floats = floats_behind(its_sums, 1, num_groups)
    scales = scales_behind(tile, count, num_groups)
    sums = sums_behind(scales, count, num_groups)
    floats = floats_behind(sums, count, num_groups)
    for group in range(num_groups):
        before = first * num_groups + group * size
        if takes & t.AS_BYTES:
            store(tile + GROUP * (before + place), load(record + GROUP * group))
            store_float(scales + 4 * (before + place), load_float(its_scales + 4 * group))
            for part in range(1 + PARTS):
                to = sums + SUMS_BYTES * before + 4 * (size * part + place)
                store_float(to, load_float(its_sums + SUMS_BYTES * group + 4 * part))
        if takes & t.AS_FLOATS:
            to = floats + 4 * GROUP * before + 4 * LANES * place
            copy_group(its_floats + 4 * GROUP * group, to, 4 * LANES * size)


@compiled
def gathered(slots: int, count: int, takes: int, num_groups: int, tile: int) -> int:
    """Return where rows lie beside each other: one is its own record, several are copied to ``tile``."""
    if count == 1:
        return load_int(slots)
    first = 0
    while first < count:
        size = tile_size(count, first)
        for place in range(size):
            record = load_int(slots + _SLOT * (first + place))
            gather_row(record, takes, num_groups, count, first, size, place, tile)
        first += size
    return tile


# ---- the router -----------------------------------------------------------------------------------------------------


@compiled
def sum_of(values: int, count: int) -> float:
    """Return the sum of floats, one after the other."""
    result = load_float(values)
    for i in range(1, count):
        result += load_float(values + 4 * i)
    return result


@compiled
def best_by_softmax(of: int, scores: int, room: int, best: int) -> float:
    """Write a row's best experts to ``room`` and their weights to ``best``; return what these are to be over."""
    count, chosen = entry(of, t.NUM_EXPERTS), entry(of, t.CHOSEN_EXPERTS)
    find_best(scores, count, chosen, room, best)
    top = load_float(best)
    for at in range(best, best + 4 * chosen, 4 * LANES):
        store(at, exponential(add(load(at), fill(-top))))
    return sum_of(best, chosen) if entry(of, t.IS_NORMED) else sum_of_exponentials(scores, count, top, 1.0)


@compiled
def best_by_biased_softmax(of: int, scores: int, room: int, best: int) -> float:
    """Do what `best_by_softmax` does, with biases that are added to the softmax for the choice alone."""
    count, chosen, biases = entry(of, t.NUM_EXPERTS), entry(of, t.CHOSEN_EXPERTS), entry(of, t.EXPERT_BIASES)
    find_best(scores, count, 1, room, best)
    top, biased = load_float(best), best + 4 * (chosen + LANES)
    all_of_them = sum_of_exponentials(scores, count, top, 1.0)
    for at in range(0, 4 * count, 4 * LANES):
        score = divide(exponential(add(load(scores + at), fill(-top))), fill(all_of_them))
        store(biased + at, add(score, load(biases + at)))
    find_best(biased, count, chosen, room, best)
    for i in range(chosen):
        score = fill(load_float(scores + 4 * load_int(room + 8 * i)))
        store_float(best + 4 * i, largest(exponential(add(score, fill(-top)))))
    return sum_of(best, chosen) if entry(of, t.IS_NORMED) else all_of_them


@compiled
def best_by_sigmoids(of: int, scores: int, room: int, best: int) -> float:
    """Do what `best_by_softmax` does, for scores that are sigmoids and biases that count for the choice alone."""
    count, chosen, biases = entry(of, t.NUM_EXPERTS), entry(of, t.CHOSEN_EXPERTS), entry(of, t.EXPERT_BIASES)
    biased = best + 4 * (chosen + LANES)
    for at in range(0, 4 * count, 4 * LANES):
        score = sigmoid(load(scores + at))
        if biases:
            score = add(score, load(biases + at))
        store(biased + at, score)
    find_best(biased, count, chosen, room, best)
    for i in range(chosen):
        chosen_score = fill(load_float(scores + 4 * load_int(room + 8 * i)))
        store_float(best + 4 * i, largest(sigmoid(chosen_score)))
    return sum_of(best, chosen) + real_entry(of, t.SUM_OFFSET) if entry(of, t.IS_NORMED) else 1.0


@compiled
def choose(of: int, scores: int, choice: int, room: int) -> None:
    """Write which experts a row takes and their weights, best first, the shared one last."""
    count, chosen = entry(of, t.NUM_EXPERTS), entry(of, t.CHOSEN_EXPERTS)
    best = room + 8 * chosen
    for at in range(best, best + 4 * chosen, 4 * LANES):
        store(at, fill(ZERO))
    if entry(of, t.HAS_SIGMOIDS):
        together = best_by_sigmoids(of, scores, room, best)
    elif entry(of, t.EXPERT_BIASES):
        together = best_by_biased_softmax(of, scores, room, best)
    else:
        together = best_by_softmax(of, scores, room, best)
    for i in range(chosen):
        store_int(choice + _CHOICE * i, load_int(room + 8 * i))
        weight = load_float(best + 4 * i) / together * real_entry(of, t.WEIGHT_SCALE)
        if entry(of, t.EXPERT_FACTORS):
            weight = weight * load_float(entry(of, t.EXPERT_FACTORS) + 4 * load_int(room + 8 * i))
        store_float(choice + _CHOICE * i + 8, weight)
    if entry(of, t.SHARED) != t.NO_SHARED:
        weight = ONE
        if entry(of, t.SHARED) == t.GATED_SHARED:
            weight = largest(sigmoid(fill(load_float(scores + 4 * count))))
        store_int(choice + _CHOICE * chosen, count)
        store_float(choice + _CHOICE * chosen + 8, weight)


@compiled
def prepare_records(table: int, takes: int, norm: int, first_row: int, num_rows: int, own: int) -> None:
    """Prepare some rows as records, each of its own."""
    num_groups, record = entry(table, t.PADDED_WIDTH) // GROUP, record_bytes(table)
    for row in range(num_rows):
        at = own + record * row
        scales = scales_behind(at, 1, num_groups)
        prepare_input(table, takes, norm, first_row + row, 1, at, scales, sums_behind(scales, 1, num_groups))


@compiled
def route(
    table: int, of: int, norm: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Prepare some rows, and choose their experts; threads share out the router's channels. Return the next turn."""
    num_groups, record, slots = entry(table, t.PADDED_WIDTH) // GROUP, record_bytes(table), slots_at(table, of, own)
    tile, takes, router_norm = tile_at(table, of, own), entry(of, t.EXPERT_TAKES), entry(of, t.ROUTER_NORM)
    if router_norm:
        prepare_records(table, t.AS_FLOATS, router_norm, first_row, num_rows, own)
    else:
        prepare_records(table, takes | t.AS_FLOATS, norm, first_row, num_rows, own)
    panels = (entry(of, t.NUM_EXPERTS) + int(entry(of, t.SHARED) == t.GATED_SHARED) + PANEL - 1) // PANEL
    start, stop, score_bytes = share(panels, part, parts), share(panels, part + 1, parts), 4 * PANEL * panels
    done, out = 0, entry(table, t.ROUTED) + score_bytes * first_row
    while done < num_rows and start < stop:
        count = min(num_rows - done, _TOGETHER)
        for row in range(count):
            store_int(slots + _SLOT * row, own + record * (done + row))
        numbers = gathered(slots, count, t.AS_FLOATS, num_groups, tile)
        scales = scales_behind(numbers, count, num_groups)
        project(
            of + 8 * t.ROUTER, count, start, stop, numbers, scales, sums_behind(scales, count, num_groups), num_groups,
            out + score_bytes * done, score_bytes, 0,
        )  # fmt: skip
        done += count
    if router_norm:
        prepare_records(table, takes, norm, first_row, num_rows, own)
    turn = wait(entry(table, t.BARRIER), parts, turn)
    for row in range(num_rows):
        choose(of, out + score_bytes * row, choices_at(table, of, own, row), room_at(table, of, own))
    return turn


@compiled
def sort_rows(table: int, of: int, own: int) -> None:
    """Sort all rows by their experts, those of an expert by their numbers."""
    rows, listed, shares = entry(table, t.ROWS), num_listed(of), shares_rows(table)
    starts, slots, threads = starts_at(table, of, own), slots_at(table, of, own), entry(table, t.THREADS)
    for expert in range(listed + 2):
        store_int(starts + 8 * expert, 0)
    for places in (0, 1):  # first how many each has, then each to its place
        for row in range(rows):
            its, local = own, row
            if shares:
                thread = holder(table, row)
                its = entry(table, t.OWN) + entry(table, t.OWN_BYTES) * thread
                local = row - share(rows, thread, threads)
            for choice in range(choices_at(table, of, its, local), choices_at(table, of, its, local + 1), _CHOICE):
                at = starts + 8 * load_int(choice)
                if places:
                    slot = slots + _SLOT * load_int(at + 8)
                    store_int(slot, its + record_bytes(table) * local)
                    store_int(slot + 8, row)
                    store_float(slot + 16, load_float(choice + 8))
                    store_int(at + 8, load_int(at + 8) + 1)
                else:
                    store_int(at + 16, load_int(at + 16) + 1)
        if places == 0:
            for expert in range(2, listed + 2):
                at = starts + 8 * expert
                store_int(at, load_int(at) + load_int(at - 8))


@compiled
def rows_of(starts: int, expert: int) -> int:
    """Return how many rows take an expert."""
    return load_int(starts + 8 * (expert + 1)) - load_int(starts + 8 * expert)


@compiled
def count_read(table: int, of: int, starts: int) -> None:
    """Add the experts that some row has chosen to those that a pass has read."""
    read = entry(table, t.EXPERTS_READ)
    for expert in range(entry(of, t.NUM_EXPERTS)):
        read += int(rows_of(starts, expert) > 0)
    store_int(table + 8 * t.EXPERTS_READ, read)


# ---- the experts ----------------------------------------------------------------------------------------------------


@compiled
def gated_sums(table: int, before: int) -> int:
    """Return where sums lie of what gates give, ``before`` groups of rows behind the first."""
    return entry(table, t.GATED_SUMS) + (SUMS_BYTES + 4 * GROUP) * before


@compiled
def gate_expert(
    table: int, of: int, its: int, slots: int, rows: int, first: int, last: int, before: int, own: int
) -> None:  # fmt: skip
    """Compute groups ``first`` to ``last`` of an expert's gate for its rows.

    Args:
        its: entry of the expert.
        before: groups of rows of the experts before it.
    """
    num_groups, num_out = entry(table, t.PADDED_WIDTH) // GROUP, entry(its, t.EXPERT_GROUPS)
    gate, up = its + 8 * t.EXPERT_GATE, its + 8 * t.EXPERT_UP
    tile, room, done = tile_at(table, of, own), room_at(table, of, own), 0
    while done < rows:
        count, behind = min(rows - done, _TOGETHER), before + done * num_out
        takes = entry(gate, t.TAKES) | entry(up, t.TAKES)
        numbers = gathered(slots + _SLOT * done, count, takes, num_groups, tile)
        scales = scales_behind(numbers, count, num_groups)
        for group in range(first, last):
            gate_tiles(
                table, gate, up, entry(its + 8 * t.EXPERT_DOWN, t.TAKES), group, num_out, count, numbers, scales,
                sums_behind(scales, count, num_groups), room, entry(table, t.GATED) + GROUP * behind,
                entry(table, t.GATED_SCALES) + 4 * behind, gated_sums(table, behind),
            )  # fmt: skip
        done += count


@compiled
def group_cost(rows: int) -> int:
    """Return what a group of channels of an expert costs, with so many rows."""
    return rows + _READING if rows else 0


@compiled
def whole_cost(of: int, starts: int) -> int:
    """Return what all gates cost."""
    cost = 0
    for expert in range(num_listed(of)):
        cost += group_cost(rows_of(starts, expert)) * entry(expert_entry(of, expert), t.EXPERT_GROUPS)
    return cost


@compiled
def gate_experts(table: int, of: int, thread: int, own: int) -> None:
    """Compute a thread's part of all gates: groups of channels, one expert after the other, at the cost of others'."""
    threads, starts, slots = entry(table, t.THREADS), starts_at(table, of, own), slots_at(table, of, own)
    whole, cost, before = whole_cost(of, starts), 0, 0
    start, stop = share(whole, thread, threads), share(whole, thread + 1, threads)
    for expert in range(num_listed(of)):
        rows, its = rows_of(starts, expert), expert_entry(of, expert)
        if rows == 0:
            continue
        num_out, each = entry(its, t.EXPERT_GROUPS), group_cost(rows)
        first = min(max((start - cost + each - 1) // each, 0), num_out)
        last = min(max((stop - cost + each - 1) // each, 0), num_out)
        if first < last:
            place = slots + _SLOT * load_int(starts + 8 * expert)
            gate_expert(table, of, its, place, rows, first, last, before, own)
        cost += each * num_out
        before += rows * num_out


@compiled
def add_expert(
    table: int, of: int, its: int, slots: int, rows: int, start: int, stop: int, before: int, own: int, to: int
) -> None:  # fmt: skip
    """Add output panels ``start`` to ``stop`` of an expert to its rows of ``to``, times weights; see `gate_expert`."""
    padded, num_groups, room = entry(table, t.PADDED_WIDTH), entry(its, t.EXPERT_GROUPS), room_at(table, of, own)
    out_bytes, done = 4 * PANEL * _DOWN_PANELS, 0
    while done < rows:
        count, behind = min(rows - done, _TOGETHER), before + done * num_groups
        # Few enough to stay in the core's cache for the next tile.
        step = _DOWN_PANELS if count <= MOST_ROWS else GROUP // PANEL
        for panel in range(start, stop, step):
            end, first = min(panel + step, stop), 0
            while first < count:
                size = tile_size(count, first)
                multiply_tile(
                    its + 8 * t.EXPERT_DOWN, count, first, size, panel, end, entry(table, t.GATED) + GROUP * behind,
                    entry(table, t.GATED_SCALES) + 4 * behind, gated_sums(table, behind), num_groups,
                    room - 4 * PANEL * panel, out_bytes, 0,
                )  # fmt: skip
                for row in range(size):
                    slot = slots + _SLOT * (done + first + row)
                    weight, source = fill(load_float(slot + 16)), room + out_bytes * row
                    hidden = to + 4 * padded * load_int(slot + 8) + 4 * PANEL * panel
                    for at in range(0, 4 * PANEL * (end - panel), 4 * LANES):
                        store(hidden + at, fma(weight, load(source + at), load(hidden + at)))
                first += size
        done += count


@compiled
def add_experts(table: int, of: int, thread: int, own: int) -> None:
    """Add a thread's channels of what all experts give to the hidden states, or to zeros beside an MLP."""
    threads, panels, before = entry(table, t.THREADS), entry(table, t.PADDED_WIDTH) // PANEL, 0
    starts, slots, to = starts_at(table, of, own), slots_at(table, of, own), entry(table, t.HIDDEN)
    start, stop = share(panels, thread, threads), share(panels, thread + 1, threads)
    if entry(of, t.EXPERTS_OUT_NORM):
        to = entry(table, t.EXPERT_SUMS)
        for row in range(entry(table, t.ROWS)):
            its_sums = to + 4 * PANEL * panels * row
            for at in range(its_sums + 4 * PANEL * start, its_sums + 4 * PANEL * stop, 4 * LANES):
                store(at, fill(ZERO))
    for expert in range(num_listed(of)):
        rows, its = rows_of(starts, expert), expert_entry(of, expert)
        if rows:
            place = slots + _SLOT * load_int(starts + 8 * expert)
            add_expert(table, of, its, place, rows, start, stop, before, own, to)
            before += rows * entry(its, t.EXPERT_GROUPS)


@separated
def run_experts(
    code: int, table: int, layer: int, first_row: int, num_rows: int, part: int, parts: int, thread: int, turn: int,
    own: int,
) -> int:  # fmt: skip
    """Do a thread's part of a layer's experts; return the next turn.

    Args:
        code: address of this function.
        layer: table of the layer.
        first_row, num_rows: the rows that the thread prepares, all of them or its own.
    """
    of, barrier, threads = entry(layer, t.EXPERTS), entry(table, t.BARRIER), entry(table, t.THREADS)
    norm = entry(of, t.EXPERT_NORM) if entry(of, t.EXPERT_NORM) else entry(layer, t.MLP_NORM)
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
