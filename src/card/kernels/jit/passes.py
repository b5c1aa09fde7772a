"""One pass of a Llama-like decoder as one call: all layers, all rows, all threads.

Each row is computed alone: the order of its sums is that of the positions of its own text, of the channels or of the
groups, whatever the rows beside it, its place in the cache, its tile or its thread. Threads share out heads and output
channels, and wait for each other five times a layer, or twice more where what a block adds is normed first. Many rows
are shared out instead, except in attention: then they wait twice, three times where records are kept, and none prepares
rows that another one prepares.
"""

from __future__ import annotations

from card.kernels.jit import tables as t
from card.kernels.jit.attention import attend_part
from card.kernels.jit.experts import run_experts
from card.kernels.jit.gated_delta import advance_states, keep_records
from card.kernels.jit.gates import gate_tiles, prepare_input
from card.kernels.jit.heads import norm_all_heads, prepare_heads
from card.kernels.jit.layer_inputs import gate_own_input, layer_inputs_bytes, make_layer_inputs, own_input
from card.kernels.jit.rows import (
    add_row,
    capped,
    prepare_rows,
    project,
    rms_norm,
    room_behind,
    scale_row,
    scales_behind,
    sums_behind,
)
from card.kernels.jit.sharing import share, shares_rows, wait
from card.kernels.jit.short_conv import convolve_part
from card.kernels.jit.tables import all_heads, attended_bytes, entry, layer_entry, real_entry
from card.kernels.jit.tiles import PANEL
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    SUMS_BYTES,
    compiled,
    fill,
    load,
    load_float,
    separated,
    store,
)


@compiled
def gated_bytes(table: int, of: int, first_row: int) -> int:
    """Return where the gated activations of rows from ``first_row`` on lie as bytes, in the layer of a table."""
    return entry(table, t.GATED) + entry(of, t.MLP) * first_row


@compiled
def gated_scales(table: int, of: int, first_row: int) -> int:
    """Return where their scales lie."""
    return entry(table, t.GATED_SCALES) + 4 * (entry(of, t.MLP) // GROUP) * first_row


@compiled
def gated_sums(table: int, of: int, first_row: int) -> int:
    """Return where their sums lie, with room behind those of any number of rows for these as floats."""
    return entry(table, t.GATED_SUMS) + (SUMS_BYTES + 4 * GROUP) * (entry(of, t.MLP) // GROUP) * first_row


@compiled
def gate(
    table: int, layer: int, first_row: int, num_rows: int, part: int, parts: int, numbers: int, scales: int, sums: int
) -> None:  # fmt: skip
    """Compute a part of activation(gate) * up for some rows, and prepare it."""
    of, num_groups = layer_entry(table, layer), entry(table, t.PADDED_WIDTH) // GROUP
    room, num_out = room_behind(sums, num_rows, num_groups), entry(of, t.MLP) // GROUP
    for group in range(share(num_out, part, parts), share(num_out, part + 1, parts)):
        gate_tiles(
            table, of + 8 * t.GATE, of + 8 * t.UP, entry(of + 8 * t.DOWN, t.TAKES), group, num_out, num_rows, numbers,
            scales, sums, room, gated_bytes(table, of, first_row), gated_scales(table, of, first_row),
            gated_sums(table, of, first_row),
        )  # fmt: skip


@compiled
def project_heads(
    table: int, of: int, linear: int, count: int, before: int, first: int, last: int, first_row: int, num_rows: int,
    numbers: int, scales: int, sums: int,
) -> None:  # fmt: skip
    """Compute those heads of a linear layer, for some rows, that are among ``first`` to ``last`` of all.

    Args:
        of: table of the decoder layer.
        count, before: heads of this linear layer, and of those before it.
    """
    padded = entry(of, t.PADDED_HEAD)
    start, stop, row_bytes = max(first - before, 0), min(last - before, count), 4 * padded * all_heads(of)
    out = entry(table, t.PROJECTED) + row_bytes * first_row + 4 * padded * before
    project(
        linear, num_rows, padded // PANEL * start, padded // PANEL * stop, numbers, scales, sums,
        entry(table, t.PADDED_WIDTH) // GROUP, out, row_bytes, entry(of, t.ADDS_HEADS),
    )  # fmt: skip


@compiled
def add_output(
    table: int, linear: int, norm: int, first_row: int, num_rows: int, numbers: int, scales: int, sums: int,
    num_groups: int, factor: int, part: int, parts: int, turn: int,
) -> int:  # fmt: skip
    """Add a part of what a block computes for some rows to the hidden states; return the next turn.

    Args:
        norm: weight of a norm to apply first; 0 for none. It sees whole rows, so the parts are then rows.
        factor: where a float lies that the sums are times, with such a norm; 0 for none.
    """
    barrier, padded = entry(table, t.BARRIER), entry(table, t.PADDED_WIDTH)
    before = 4 * padded * first_row
    hidden, added = entry(table, t.HIDDEN) + before, entry(table, t.ADDED) + before
    first, last = share(padded // PANEL, part, parts), share(padded // PANEL, part + 1, parts)
    if not norm:
        project(linear, num_rows, first, last, numbers, scales, sums, num_groups, hidden, 4 * padded, 1)
        return wait(barrier, parts, turn)
    project(linear, num_rows, first, last, numbers, scales, sums, num_groups, added, 4 * padded, 0)
    turn = wait(barrier, parts, turn)
    for row in range(part, num_rows, parts):
        its = added + 4 * padded * row
        rms_norm(its, norm, its, entry(table, t.WIDTH), padded, real_entry(table, t.EPS))
        add_row(its, hidden + 4 * padded * row, padded)
        if factor:
            scale_row(hidden + 4 * padded * row, load_float(factor), padded)
    return wait(barrier, parts, turn)


@compiled
def cap_logits(table: int, first: int, last: int) -> None:
    """Bound panels ``first`` to ``last`` of all logits."""
    num_bytes, cap = 4 * entry(table, t.VOCAB), fill(real_entry(table, t.LOGIT_CAP))
    for row in range(entry(table, t.NUM_CHOSEN)):
        its = entry(table, t.LOGITS) + num_bytes * row
        for at in range(its + 4 * PANEL * first, its + 4 * PANEL * last, 4 * LANES):
            store(at, capped(load(at), cap))


@compiled
def begin_layer(
    table: int, layer: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of queries, keys and values of some rows, and return the next turn."""
    of, groups, barrier = layer_entry(table, layer), entry(table, t.PADDED_WIDTH) // GROUP, entry(table, t.BARRIER)
    heads, kv_heads, is_parallel = entry(of, t.HEADS), entry(of, t.MADE_KV_HEADS), entry(table, t.IS_PARALLEL)
    more, attending = entry(of, t.MORE_HEADS), heads + 2 * kv_heads
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    takes = entry(of + 8 * t.QUERY, t.TAKES) | entry(of + 8 * t.KEY, t.TAKES) | entry(of + 8 * t.VALUE, t.TAKES)
    takes |= entry(of + 8 * t.MORE, t.TAKES)
    if is_parallel:  # the MLP reads what attention reads
        takes |= entry(of + 8 * t.GATE, t.TAKES) | entry(of + 8 * t.UP, t.TAKES)
    prepare_input(table, takes, entry(of, t.INPUT_NORM), first_row, num_rows, own, scales, sums)
    first, last = share(attending + more, part, parts), share(attending + more, part + 1, parts)
    for linear, count, before in (
        (of + 8 * t.QUERY, heads, 0), (of + 8 * t.KEY, kv_heads, heads), (of + 8 * t.VALUE, kv_heads, heads + kv_heads),
        (of + 8 * t.MORE, more, attending),
    ):  # fmt: skip
        project_heads(table, of, linear, count, before, first, last, first_row, num_rows, own, scales, sums)
    if entry(table, t.HAS_WIDE_NORMS):
        turn = wait(barrier, parts, turn)
        for row in range(first_row + part, first_row + num_rows, parts):
            norm_all_heads(table, layer, row)
        turn = wait(barrier, parts, turn)
    if not entry(of, t.FILTER):
        prepare_heads(table, layer, first_row, first_row + num_rows, first, min(last, attending))
    if is_parallel:
        gate(table, layer, first_row, num_rows, part, parts, own, scales, sums)
    return turn


@compiled
def gate_mlp(
    table: int, layer: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of the gate of the MLP of some rows; return the next turn."""
    of, groups = layer_entry(table, layer), entry(table, t.PADDED_WIDTH) // GROUP
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    takes = entry(of + 8 * t.GATE, t.TAKES) | entry(of + 8 * t.UP, t.TAKES)
    prepare_input(table, takes, entry(of, t.MLP_NORM), first_row, num_rows, own, scales, sums)
    gate(table, layer, first_row, num_rows, part, parts, own, scales, sums)
    return wait(entry(table, t.BARRIER), parts, turn)


@compiled
def run_mlp(
    table: int, layer: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of the MLP of some rows, or of what it adds if its gate is done; return the next turn."""
    of = layer_entry(table, layer)
    if not entry(table, t.IS_PARALLEL):
        turn = gate_mlp(table, layer, first_row, num_rows, part, parts, turn, own)
    return add_output(
        table, of + 8 * t.DOWN, entry(of, t.MLP_OUT_NORM), first_row, num_rows, gated_bytes(table, of, first_row),
        gated_scales(table, of, first_row), gated_sums(table, of, first_row), entry(of, t.MLP) // GROUP,
        entry(of, t.FACTOR), part, parts, turn,
    )  # fmt: skip


@compiled
def add_both(table: int, layer: int, row: int) -> None:
    """Add to a row what an MLP and the experts beside it give, each normed and then both together."""
    of, padded, eps = entry(layer, t.EXPERTS), entry(table, t.PADDED_WIDTH), real_entry(table, t.EPS)
    width, before = entry(table, t.WIDTH), 4 * padded * row
    its, others, hidden = (
        entry(table, t.ADDED) + before,
        entry(table, t.EXPERT_SUMS) + before,
        entry(table, t.HIDDEN) + before,
    )
    rms_norm(its, entry(of, t.MLP_ALONE_NORM), its, width, padded, eps)
    rms_norm(others, entry(of, t.EXPERTS_OUT_NORM), others, width, padded, eps)
    add_row(others, its, padded)
    rms_norm(its, entry(layer, t.MLP_OUT_NORM), its, width, padded, eps)
    add_row(its, hidden, padded)
    if entry(layer, t.FACTOR):
        scale_row(hidden, load_float(entry(layer, t.FACTOR)), padded)


@compiled
def run_both(
    table: int, layer: int, first_row: int, num_rows: int, part: int, parts: int, thread: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of an MLP and of the experts beside it; return the next turn."""
    of, padded = layer_entry(table, layer), entry(table, t.PADDED_WIDTH)
    turn = gate_mlp(table, layer, first_row, num_rows, part, parts, turn, own)
    project(
        of + 8 * t.DOWN, num_rows, share(padded // PANEL, part, parts), share(padded // PANEL, part + 1, parts),
        gated_bytes(table, of, first_row), gated_scales(table, of, first_row), gated_sums(table, of, first_row),
        entry(of, t.MLP) // GROUP, entry(table, t.ADDED) + 4 * padded * first_row, 4 * padded, 0,
    )  # fmt: skip
    turn = run_experts(
        entry(entry(of, t.EXPERTS), t.EXPERT_CODE), table, of, first_row, num_rows, part, parts, thread, turn, own
    )
    for row in range(first_row + part, first_row + num_rows, parts):
        add_both(table, of, row)
    return wait(entry(table, t.BARRIER), parts, turn)


@compiled
def add_own_input(
    table: int, of: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Add a part of what the numbers give that tokens have for a layer; return the next turn."""
    its, num_groups = entry(of, t.OWN_INPUT), entry(table, t.PADDED_OWN_WIDTH) // GROUP
    gate_own_input(table, its, first_row, num_rows, part, parts, own)
    turn = wait(entry(table, t.BARRIER), parts, turn)
    scales = scales_behind(own, num_rows, num_groups)
    sums = sums_behind(scales, num_rows, num_groups)
    prepare_rows(
        entry(its + 8 * t.INPUT_OUT, t.TAKES), own_input(table, its, first_row), layer_inputs_bytes(table), num_rows, 0,
        0, 0, num_groups, real_entry(table, t.EPS), own, scales, sums, 0,
    )  # fmt: skip
    return add_output(
        table, its + 8 * t.INPUT_OUT, entry(its, t.INPUT_OUT_NORM), first_row, num_rows, own, scales, sums, num_groups,
        entry(its, t.INPUT_FACTOR), part, parts, turn,
    )  # fmt: skip


@compiled
def end_layer(
    table: int, layer: int, first_row: int, num_rows: int, part: int, parts: int, thread: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of what follows attention, of some rows, and return the next turn."""
    of = layer_entry(table, layer)
    if entry(of, t.KEY_SIZE):
        keep_records(table, of, first_row, num_rows, part, parts)
        if shares_rows(table):  # rows are of another size in the next layer, so that a thread's lie where others' were
            turn = wait(entry(table, t.BARRIER), entry(table, t.THREADS), turn)
    row_bytes = attended_bytes(of)
    groups, out = row_bytes // (4 * GROUP), of + 8 * t.ATTENTION_OUT
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    prepare_rows(
        entry(out, t.TAKES), entry(table, t.ATTENDED) + row_bytes * first_row, row_bytes, num_rows, 0, 0, 0, groups,
        real_entry(table, t.EPS), own, scales, sums, 0,
    )  # fmt: skip
    norm = entry(of, t.ATTENTION_OUT_NORM)
    turn = add_output(table, out, norm, first_row, num_rows, own, scales, sums, groups, 0, part, parts, turn)
    if entry(of, t.EXPERTS) and entry(of, t.MLP):
        turn = run_both(table, layer, first_row, num_rows, part, parts, thread, turn, own)
    elif entry(of, t.EXPERTS):
        turn = run_experts(
            entry(entry(of, t.EXPERTS), t.EXPERT_CODE), table, of, first_row, num_rows, part, parts, thread, turn, own
        )
    else:
        turn = run_mlp(table, layer, first_row, num_rows, part, parts, turn, own)
    if entry(of, t.OWN_INPUT):
        turn = add_own_input(table, of, first_row, num_rows, part, parts, turn, own)
    copy_to, padded = entry(of, t.COPY_TO), entry(table, t.PADDED_WIDTH)
    if (
        copy_to and part == 0
    ):  # other threads write to these hidden states only after this one has reached the next layer
        for at in range(4 * padded * first_row, 4 * padded * (first_row + num_rows), 4 * LANES):
            store(copy_to + at, load(entry(table, t.HIDDEN) + at))
    return turn


@compiled
def run_layer(table: int, layer: int, thread: int, turn: int, own: int) -> int:
    """Do a thread's part of a layer; return the next turn."""
    threads, barrier = entry(table, t.THREADS), entry(table, t.BARRIER)
    first_row, num_rows, part, parts = 0, entry(table, t.ROWS), thread, threads
    if shares_rows(table):
        first_row = share(num_rows, thread, threads)
        num_rows, part, parts = share(num_rows, thread + 1, threads) - first_row, 0, 1
    if layer == 0 and entry(table, t.PADDED_OWN_WIDTH):
        make_layer_inputs(table, first_row, num_rows, part, parts, own)
    turn = begin_layer(table, layer, first_row, num_rows, part, parts, turn, own)
    turn = wait(barrier, threads, turn)
    states_code = entry(layer_entry(table, layer), t.STATES_CODE)
    if states_code:
        advance_states(states_code, table, layer, thread, own)
    elif entry(layer_entry(table, layer), t.FILTER):
        convolve_part(table, layer, thread)
    else:
        attend_part(table, layer, thread, own)
    turn = wait(barrier, threads, turn)
    return end_layer(table, layer, first_row, num_rows, part, parts, thread, turn, own)


@separated
def run(code: int, table: int, thread: int) -> None:
    """Do a thread's part of the pass that a table describes; all its threads must be under way at once.

    ``code`` is the address of this function.
    """
    threads, own = entry(table, t.THREADS), entry(table, t.OWN) + thread * entry(table, t.OWN_BYTES)
    turn = 1
    for layer in range(entry(table, t.LAYERS)):
        turn = run_layer(table, layer, thread, turn, own)
    if shares_rows(table):
        turn = wait(entry(table, t.BARRIER), threads, turn)
    num_chosen, groups = entry(table, t.NUM_CHOSEN), entry(table, t.PADDED_WIDTH) // GROUP
    scales = scales_behind(own, num_chosen, groups)
    sums = sums_behind(scales, num_chosen, groups)
    prepare_rows(
        entry(table + 8 * t.OUTPUT, t.TAKES), entry(table, t.HIDDEN), 4 * GROUP * groups, num_chosen,
        entry(table, t.WIDTH), entry(table, t.NORM), entry(table, t.CENTRES), groups, real_entry(table, t.EPS), own,
        scales, sums, entry(table, t.CHOSEN_ROWS),
    )  # fmt: skip
    panels = entry(table, t.VOCAB) // PANEL
    first, last = share(panels, thread, threads), share(panels, thread + 1, threads)
    out, out_bytes = entry(table, t.LOGITS), 4 * PANEL * panels
    project(table + 8 * t.OUTPUT, num_chosen, first, last, own, scales, sums, groups, out, out_bytes, 0)
    if entry(table, t.LOGIT_CAP):
        cap_logits(table, first, last)
    wait(entry(table, t.BARRIER), threads, turn)
