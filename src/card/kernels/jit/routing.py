"""A layer's router: it says which experts each row takes, and with what weight; rows are then sorted by them.

The router multiplies floats, and nothing of it is rounded to fewer bits. Of equal scores the lower expert's counts
first.
"""

from __future__ import annotations

from card.kernels.jit import tables as t
from card.kernels.jit.expert_rows import (
    CHOICE_BYTES,
    SLOT_BYTES,
    TOGETHER,
    choices_at,
    gathered,
    num_listed,
    record_bytes,
    room_at,
    slots_at,
    starts_at,
    tile_at,
)
from card.kernels.jit.gates import prepare_input
from card.kernels.jit.likeliest import fault, find_best, sum_of_exponentials
from card.kernels.jit.rows import ONE, ZERO, exponential, project, scales_behind, sigmoid, sums_behind
from card.kernels.jit.sharing import holder, share, shares_rows, wait
from card.kernels.jit.tables import ExpertTable, PassTable
from card.kernels.jit.tiles import PANEL
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    add,
    compiled,
    divide,
    fill,
    largest,
    load,
    load_float,
    load_int,
    store,
    store_float,
    store_int,
)


@compiled
def sum_of(values: int, count: int) -> float:
    """Return the sum of floats, one after the other."""
    result = load_float(values)
    for i in range(1, count):
        result += load_float(values + 4 * i)
    return result


@compiled
def faults_of(scores: int, count: int) -> float:
    """Return 0, or NaN if one of some scores is NaN or infinity."""
    faults = fill(ZERO)
    for i in range(count):
        faults = fault(fill(load_float(scores + 4 * i)), faults)
    return largest(faults)


@compiled
def best_by_softmax(of: ExpertTable, scores: int, room: int, best: int) -> float:
    """Write a row's best experts to ``room`` and their weights to ``best``; return what these are to be over."""
    count, chosen = of.num_experts, of.num_chosen
    find_best(scores, count, chosen, room, best)
    top = load_float(best)
    for at in range(best, best + 4 * chosen, 4 * LANES):
        store(at, exponential(add(load(at), fill(-top))))
    return sum_of(best, chosen) if of.is_normed else sum_of_exponentials(scores, count, top, 1.0)


@compiled
def best_by_biased_softmax(of: ExpertTable, scores: int, room: int, best: int) -> float:
    """Do what `best_by_softmax` does, with biases that are added to the softmax for the choice alone."""
    count, chosen, biases = of.num_experts, of.num_chosen, of.biases
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
    return sum_of(best, chosen) if of.is_normed else all_of_them


@compiled
def best_by_sigmoids(of: ExpertTable, scores: int, room: int, best: int) -> float:
    """Do what `best_by_softmax` does, for scores that are sigmoids and biases that count for the choice alone."""
    count, chosen, biases = of.num_experts, of.num_chosen, of.biases
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
    return sum_of(best, chosen) + of.sum_offset if of.is_normed else 1.0


@compiled
def choose(of: ExpertTable, scores: int, choice: int, room: int) -> None:
    """Write which experts a row takes and their weights, best first, the shared one last."""
    count, chosen = of.num_experts, of.num_chosen
    best = room + 8 * chosen
    for at in range(best, best + 4 * chosen, 4 * LANES):
        store(at, fill(ZERO))
    if of.has_sigmoids:
        together = best_by_sigmoids(of, scores, room, best)
    elif of.biases:
        together = best_by_biased_softmax(of, scores, room, best)
    else:
        together = best_by_softmax(of, scores, room, best)
    together += faults_of(scores, count)  # no comparison chooses what is no number
    if of.biases:
        together += faults_of(of.biases, count)
    for i in range(chosen):
        store_int(choice + CHOICE_BYTES * i, load_int(room + 8 * i))
        weight = load_float(best + 4 * i) / together * of.weight_scale
        if of.factors:
            weight = weight * load_float(of.factors + 4 * load_int(room + 8 * i))
        store_float(choice + CHOICE_BYTES * i + 8, weight)
    if of.shared != t.NO_SHARED:
        weight = ONE
        if of.shared == t.GATED_SHARED:
            weight = largest(sigmoid(fill(load_float(scores + 4 * count))))
        store_int(choice + CHOICE_BYTES * chosen, count)
        store_float(choice + CHOICE_BYTES * chosen + 8, weight)


@compiled
def prepare_records(table: PassTable, takes: int, norm: int, first_row: int, num_rows: int, own: int) -> None:
    """Prepare some rows as records, each of its own."""
    num_groups, record = table.padded_width // GROUP, record_bytes(table)
    for row in range(num_rows):
        at = own + record * row
        scales = scales_behind(at, 1, num_groups)
        prepare_input(table, takes, norm, first_row + row, 1, at, scales, sums_behind(scales, 1, num_groups))


@compiled
def route(
    table: PassTable, of: ExpertTable, norm: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own:
    int,
) -> int:  # fmt: skip
    """Prepare some rows, and choose their experts; threads share out the router's channels. Return the next turn."""
    num_groups, record, slots = table.padded_width // GROUP, record_bytes(table), slots_at(table, of, own)
    tile, takes, router_norm = tile_at(table, of, own), of.takes, of.router_norm
    if router_norm:
        prepare_records(table, t.AS_FLOATS, router_norm, first_row, num_rows, own)
    else:
        prepare_records(table, takes | t.AS_FLOATS, norm, first_row, num_rows, own)
    panels = (of.num_experts + int(of.shared == t.GATED_SHARED) + PANEL - 1) // PANEL
    start, stop, score_bytes = share(panels, part, parts), share(panels, part + 1, parts), 4 * PANEL * panels
    done, out = 0, table.routed + score_bytes * first_row
    while done < num_rows and start < stop:
        count = min(num_rows - done, TOGETHER)
        for row in range(count):
            store_int(slots + SLOT_BYTES * row, own + record * (done + row))
        numbers = gathered(slots, count, t.AS_FLOATS, num_groups, tile)
        scales = scales_behind(numbers, count, num_groups)
        project(
            of.router, count, start, stop, numbers, scales, sums_behind(scales, count, num_groups), num_groups,
            out + score_bytes * done, score_bytes, 0,
        )  # fmt: skip
        done += count
    if router_norm:
        prepare_records(table, takes, norm, first_row, num_rows, own)
    turn = wait(table.barrier, parts, turn)
    for row in range(num_rows):
        choose(of, out + score_bytes * row, choices_at(table, of, own, row), room_at(table, of, own))
    return turn


@compiled
def sort_rows(table: PassTable, of: ExpertTable, own: int) -> None:
    """Sort all rows by their experts, those of an expert by their numbers."""
    rows, listed, shares = table.num_rows, num_listed(of), shares_rows(table)
    starts, slots, threads = starts_at(table, of, own), slots_at(table, of, own), table.num_threads
    for expert in range(listed + 2):
        store_int(starts + 8 * expert, 0)
    for places in (0, 1):  # first how many each has, then each to its place
        for row in range(rows):
            its, local = own, row
            if shares:
                thread = holder(table, row)
                its = table.rooms + table.room_bytes * thread
                local = row - share(rows, thread, threads)
            for choice in range(choices_at(table, of, its, local), choices_at(table, of, its, local + 1), CHOICE_BYTES):
                at = starts + 8 * load_int(choice)
                if places:
                    slot = slots + SLOT_BYTES * load_int(at + 8)
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
