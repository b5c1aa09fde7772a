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
from card.kernels.jit.rows import (
    ONE,
    ZERO,
    Activations,
    Output,
    exponential,
    project,
    scales_behind,
    sigmoid,
    sums_behind,
)
from card.kernels.jit.sharing import Work, holder, share, shares_rows, wait
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
def best_by_softmax(experts: ExpertTable, scores: int, room: int, best: int) -> float:
    """Write a row's best experts to ``room`` and their weights to ``best``; return what these are to be over."""
    count, chosen = experts.num_experts, experts.num_chosen
    find_best(scores, count, chosen, room, best)
    top = load_float(best)
    for at in range(best, best + 4 * chosen, 4 * LANES):
        store(at, exponential(add(load(at), fill(-top))))
    return sum_of(best, chosen) if experts.is_normed else sum_of_exponentials(scores, count, top, 1.0)


@compiled
def best_by_biased_softmax(experts: ExpertTable, scores: int, room: int, best: int) -> float:
    """Do what `best_by_softmax` does, with biases that are added to the softmax for the choice alone."""
    count, chosen, biases = experts.num_experts, experts.num_chosen, experts.biases
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
    return sum_of(best, chosen) if experts.is_normed else all_of_them


@compiled
def best_by_sigmoids(experts: ExpertTable, scores: int, room: int, best: int) -> float:
    """Do what `best_by_softmax` does, for scores that are sigmoids and biases that count for the choice alone."""
    count, chosen, biases = experts.num_experts, experts.num_chosen, experts.biases
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
    return sum_of(best, chosen) + experts.sum_offset if experts.is_normed else 1.0


@compiled
def choose(experts: ExpertTable, scores: int, choice: int, room: int) -> None:
    """Write which experts a row takes and their weights, best first, the shared one last."""
    count, chosen = experts.num_experts, experts.num_chosen
    best = room + 8 * chosen
    for at in range(best, best + 4 * chosen, 4 * LANES):
        store(at, fill(ZERO))
    if experts.has_sigmoids:
        together = best_by_sigmoids(experts, scores, room, best)
    elif experts.biases:
        together = best_by_biased_softmax(experts, scores, room, best)
    else:
        together = best_by_softmax(experts, scores, room, best)
    together += faults_of(scores, count)  # no comparison chooses what is no number
    if experts.biases:
        together += faults_of(experts.biases, count)
    for i in range(chosen):
        store_int(choice + CHOICE_BYTES * i, load_int(room + 8 * i))
        weight = load_float(best + 4 * i) / together * experts.weight_scale
        if experts.factors:
            weight = weight * load_float(experts.factors + 4 * load_int(room + 8 * i))
        store_float(choice + CHOICE_BYTES * i + 8, weight)
    if experts.shared != t.NO_SHARED:
        weight = ONE
        if experts.shared == t.GATED_SHARED:
            weight = largest(sigmoid(fill(load_float(scores + 4 * count))))
        store_int(choice + CHOICE_BYTES * chosen, count)
        store_float(choice + CHOICE_BYTES * chosen + 8, weight)


@compiled
def prepare_records(table: PassTable, takes: int, norm: int, first_row: int, num_rows: int, scratch: int) -> None:
    """Write some rows as the experts' input, a record for each row."""
    num_groups, record = table.padded_width // GROUP, record_bytes(table)
    for row in range(num_rows):
        at = scratch + record * row
        scales = scales_behind(at, 1, num_groups)
        prepare_input(
            table, takes, norm, first_row + row, 1, Activations(at, scales, sums_behind(scales, 1, num_groups))
        )


@compiled
def route(table: PassTable, experts: ExpertTable, norm: int, work: Work, turn: int, scratch: int) -> int:
    """Prepare some rows, and choose their experts; threads share out the router's channels. Return the next turn."""
    num_groups, record, slots = table.padded_width // GROUP, record_bytes(table), slots_at(table, experts, scratch)
    tile, takes, router_norm = tile_at(table, experts, scratch), experts.takes, experts.router_norm
    if router_norm:
        prepare_records(table, t.AS_FLOATS, router_norm, work.first_row, work.num_rows, scratch)
    else:
        prepare_records(table, takes | t.AS_FLOATS, norm, work.first_row, work.num_rows, scratch)
    panels = (experts.num_experts + int(experts.shared == t.GATED_SHARED) + PANEL - 1) // PANEL
    start, stop, score_bytes = (
        share(panels, work.part, work.parts),
        share(panels, work.part + 1, work.parts),
        4 * PANEL * panels,
    )
    done, out = 0, table.routed + score_bytes * work.first_row
    while done < work.num_rows and start < stop:
        count = min(work.num_rows - done, TOGETHER)
        for row in range(count):
            store_int(slots + SLOT_BYTES * row, scratch + record * (done + row))
        numbers = gathered(slots, count, t.AS_FLOATS, num_groups, tile)
        scales = scales_behind(numbers, count, num_groups)
        project(
            experts.router, count, start, stop, Activations(numbers, scales, sums_behind(scales, count, num_groups)),
            num_groups, Output(out + score_bytes * done, score_bytes, 0), 0,
        )  # fmt: skip
        done += count
    if router_norm:
        prepare_records(table, takes, norm, work.first_row, work.num_rows, scratch)
    turn = wait(table.barrier, work.parts, turn)
    for row in range(work.num_rows):
        choose(
            experts, out + score_bytes * row, choices_at(table, experts, scratch, row), room_at(table, experts, scratch)
        )
    return turn


@compiled
def sort_rows(table: PassTable, experts: ExpertTable, scratch: int) -> None:
    """Sort all rows by their experts, those of an expert by their numbers."""
    rows, listed, shares = table.num_rows, num_listed(experts), shares_rows(table)
    starts, slots, threads = starts_at(table, experts, scratch), slots_at(table, experts, scratch), table.num_threads
    for expert in range(listed + 2):
        store_int(starts + 8 * expert, 0)
    for places in (0, 1):  # first how many each has, then each to its place
        for row in range(rows):
            its_scratch, local = scratch, row
            if shares:
                thread = holder(table, row)
                its_scratch = table.scratch + table.scratch_bytes * thread
                local = row - share(rows, thread, threads)
            for choice in range(
                choices_at(table, experts, its_scratch, local),
                choices_at(table, experts, its_scratch, local + 1),
                CHOICE_BYTES,
            ):
                at = starts + 8 * load_int(choice)
                if places:
                    slot = slots + SLOT_BYTES * load_int(at + 8)
                    store_int(slot, its_scratch + record_bytes(table) * local)
                    store_int(slot + 8, row)
                    store_float(slot + 16, load_float(choice + 8))
                    store_int(at + 8, load_int(at + 8) + 1)
                else:
                    store_int(at + 16, load_int(at + 16) + 1)
        if places == 0:
            for expert in range(2, listed + 2):
                at = starts + 8 * expert
                store_int(at, load_int(at) + load_int(at - 8))
