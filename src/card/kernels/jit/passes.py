"""One pass of a Llama-like decoder as one call: all layers, all rows, all threads.

Each row is computed alone: the order of its sums is that of the positions of its own text, of the channels or of the
groups, whatever the rows beside it, its place in the cache, its tile or its thread. Threads share out heads and output
channels, and wait for each other five times a layer, or twice more where what a block adds is normed first. Many rows
are shared out instead, except in attention: then they wait twice, three times where records are kept, and none prepares
rows that another one prepares.
"""

from __future__ import annotations

from card.kernels.jit.addresses import all_heads, attended_bytes, layer_entry
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
from card.kernels.jit.tables import LayerTable, LinearEntry, PassTable
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
def gated_bytes(table: PassTable, of: LayerTable, first_row: int) -> int:
    """Return where the gated activations of rows from ``first_row`` on lie as bytes, in the layer of a table."""
    return table.gated + of.mlp_width * first_row


@compiled
def gated_scales(table: PassTable, of: LayerTable, first_row: int) -> int:
    """Return where their scales lie."""
    return table.gated_scales + 4 * (of.mlp_width // GROUP) * first_row


@compiled
def gated_sums(table: PassTable, of: LayerTable, first_row: int) -> int:
    """Return where their sums lie, with room behind those of any number of rows for these as floats."""
    return table.gated_sums + (SUMS_BYTES + 4 * GROUP) * (of.mlp_width // GROUP) * first_row


@compiled
def gate(
    table: PassTable, layer: int, first_row: int, num_rows: int, part: int, parts: int, numbers: int, scales: int, sums:
    int,
) -> None:  # fmt: skip
    """Compute a part of activation(gate) * up for some rows, and prepare it."""
    of, num_groups = layer_entry(table, layer), table.padded_width // GROUP
    room, num_out = room_behind(sums, num_rows, num_groups), of.mlp_width // GROUP
    for group in range(share(num_out, part, parts), share(num_out, part + 1, parts)):
        gate_tiles(
            table, of.gate, of.up, of.down.takes, group, num_out, num_rows, numbers,
            scales, sums, room, gated_bytes(table, of, first_row), gated_scales(table, of, first_row),
            gated_sums(table, of, first_row),
        )  # fmt: skip


@compiled
def project_heads(
    table: PassTable, of: LayerTable, linear: LinearEntry, count: int, before: int, first: int, last: int, first_row:
    int, num_rows: int, numbers: int, scales: int, sums: int,
) -> None:  # fmt: skip
    """Compute those heads of a linear layer, for some rows, that are among ``first`` to ``last`` of all.

    Args:
        of: table of the decoder layer.
        count, before: heads of this linear layer, and of those before it.
    """
    padded = of.padded_head
    start, stop, row_bytes = max(first - before, 0), min(last - before, count), 4 * padded * all_heads(of)
    out = table.projected + row_bytes * first_row + 4 * padded * before
    project(
        linear, num_rows, padded // PANEL * start, padded // PANEL * stop, numbers, scales, sums,
        table.padded_width // GROUP, out, row_bytes, of.adds_heads,
    )  # fmt: skip


@compiled
def add_output(
    table: PassTable, linear: LinearEntry, norm: int, first_row: int, num_rows: int, numbers: int, scales: int, sums:
    int, num_groups: int, factor: int, part: int, parts: int, turn: int,
) -> int:  # fmt: skip
    """Add a part of what a block computes for some rows to the hidden states; return the next turn.

    Args:
        norm: weight of a norm to apply first; 0 for none. It sees whole rows, so the parts are then rows.
        factor: where a float lies that the sums are times, with such a norm; 0 for none.
    """
    barrier, padded = table.barrier, table.padded_width
    before = 4 * padded * first_row
    hidden, added = table.hidden + before, table.added + before
    first, last = share(padded // PANEL, part, parts), share(padded // PANEL, part + 1, parts)
    if not norm:
        project(linear, num_rows, first, last, numbers, scales, sums, num_groups, hidden, 4 * padded, 1)
        return wait(barrier, parts, turn)
    project(linear, num_rows, first, last, numbers, scales, sums, num_groups, added, 4 * padded, 0)
    turn = wait(barrier, parts, turn)
    for row in range(part, num_rows, parts):
        its = added + 4 * padded * row
        rms_norm(its, norm, its, table.width, padded, table.eps)
        add_row(its, hidden + 4 * padded * row, padded)
        if factor:
            scale_row(hidden + 4 * padded * row, load_float(factor), padded)
    return wait(barrier, parts, turn)


@compiled
def cap_logits(table: PassTable, first: int, last: int) -> None:
    """Bound panels ``first`` to ``last`` of all logits."""
    num_bytes, cap = 4 * table.num_outputs, fill(table.logit_cap)
    for row in range(table.num_chosen):
        its = table.logits + num_bytes * row
        for at in range(its + 4 * PANEL * first, its + 4 * PANEL * last, 4 * LANES):
            store(at, capped(load(at), cap))


@compiled
def begin_layer(
    table: PassTable, layer: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of queries, keys and values of some rows, and return the next turn."""
    of, groups, barrier = layer_entry(table, layer), table.padded_width // GROUP, table.barrier
    heads, kv_heads, is_parallel = of.heads, of.made_kv_heads, table.is_parallel
    more, attending = of.more_heads, heads + 2 * kv_heads
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    takes = of.query.takes | of.key.takes | of.value.takes
    takes |= of.more.takes
    if is_parallel:  # the MLP reads what attention reads
        takes |= of.gate.takes | of.up.takes
    prepare_input(table, takes, of.input_norm, first_row, num_rows, own, scales, sums)
    first, last = share(attending + more, part, parts), share(attending + more, part + 1, parts)
    for linear, count, before in (
        (of.query, heads, 0), (of.key, kv_heads, heads), (of.value, kv_heads, heads + kv_heads),
        (of.more, more, attending),
    ):  # fmt: skip
        project_heads(table, of, linear, count, before, first, last, first_row, num_rows, own, scales, sums)
    if table.has_wide_norms:
        turn = wait(barrier, parts, turn)
        for row in range(first_row + part, first_row + num_rows, parts):
            norm_all_heads(table, layer, row)
        turn = wait(barrier, parts, turn)
    if not of.filter:
        prepare_heads(table, layer, first_row, first_row + num_rows, first, min(last, attending))
    if is_parallel:
        gate(table, layer, first_row, num_rows, part, parts, own, scales, sums)
    return turn


@compiled
def gate_mlp(
    table: PassTable, layer: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of the gate of the MLP of some rows; return the next turn."""
    of, groups = layer_entry(table, layer), table.padded_width // GROUP
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    takes = of.gate.takes | of.up.takes
    prepare_input(table, takes, of.mlp_norm, first_row, num_rows, own, scales, sums)
    gate(table, layer, first_row, num_rows, part, parts, own, scales, sums)
    return wait(table.barrier, parts, turn)


@compiled
def run_mlp(
    table: PassTable, layer: int, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of the MLP of some rows, or of what it adds if its gate is done; return the next turn."""
    of = layer_entry(table, layer)
    if not table.is_parallel:
        turn = gate_mlp(table, layer, first_row, num_rows, part, parts, turn, own)
    return add_output(
        table, of.down, of.mlp_out_norm, first_row, num_rows, gated_bytes(table, of, first_row),
        gated_scales(table, of, first_row), gated_sums(table, of, first_row), of.mlp_width // GROUP,
        of.factor, part, parts, turn,
    )  # fmt: skip


@compiled
def add_both(table: PassTable, layer: LayerTable, row: int) -> None:
    """Add to a row what an MLP and the experts beside it give, each normed and then both together."""
    of, padded, eps = layer.experts, table.padded_width, table.eps
    width, before = table.width, 4 * padded * row
    its, others, hidden = (
        table.added + before,
        table.expert_sums + before,
        table.hidden + before,
    )
    rms_norm(its, of.mlp_norm, its, width, padded, eps)
    rms_norm(others, of.output_norm, others, width, padded, eps)
    add_row(others, its, padded)
    rms_norm(its, layer.mlp_out_norm, its, width, padded, eps)
    add_row(its, hidden, padded)
    if layer.factor:
        scale_row(hidden, load_float(layer.factor), padded)


@compiled
def run_both(
    table: PassTable, layer: int, first_row: int, num_rows: int, part: int, parts: int, thread: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of an MLP and of the experts beside it; return the next turn."""
    of, padded = layer_entry(table, layer), table.padded_width
    turn = gate_mlp(table, layer, first_row, num_rows, part, parts, turn, own)
    project(
        of.down, num_rows, share(padded // PANEL, part, parts), share(padded // PANEL, part + 1, parts),
        gated_bytes(table, of, first_row), gated_scales(table, of, first_row), gated_sums(table, of, first_row),
        of.mlp_width // GROUP, table.added + 4 * padded * first_row, 4 * padded, 0,
    )  # fmt: skip
    turn = run_experts(of.experts.code, table, of, first_row, num_rows, part, parts, thread, turn, own)
    for row in range(first_row + part, first_row + num_rows, parts):
        add_both(table, of, row)
    return wait(table.barrier, parts, turn)


@compiled
def add_own_input(
    table: PassTable, of: LayerTable, first_row: int, num_rows: int, part: int, parts: int, turn: int, own: int
) -> int:  # fmt: skip
    """Add a part of what the numbers give that tokens have for a layer; return the next turn."""
    its, num_groups = of.layer_input, table.padded_input_width // GROUP
    gate_own_input(table, its, first_row, num_rows, part, parts, own)
    turn = wait(table.barrier, parts, turn)
    scales = scales_behind(own, num_rows, num_groups)
    sums = sums_behind(scales, num_rows, num_groups)
    prepare_rows(
        its.out.takes, own_input(table, its, first_row), layer_inputs_bytes(table), num_rows, 0,
        0, 0, num_groups, table.eps, own, scales, sums, 0,
    )  # fmt: skip
    return add_output(
        table, its.out, its.norm, first_row, num_rows, own, scales, sums, num_groups,
        its.factor, part, parts, turn,
    )  # fmt: skip


@compiled
def end_layer(
    table: PassTable, layer: int, first_row: int, num_rows: int, part: int, parts: int, thread: int, turn: int, own: int
) -> int:  # fmt: skip
    """Compute a part of what follows attention, of some rows, and return the next turn."""
    of = layer_entry(table, layer)
    if of.key_size:
        keep_records(table, of, first_row, num_rows, part, parts)
        if shares_rows(table):  # rows are of another size in the next layer, so that a thread's lie where others' were
            turn = wait(table.barrier, table.num_threads, turn)
    row_bytes = attended_bytes(of)
    groups, out = row_bytes // (4 * GROUP), of.attention_out
    scales = scales_behind(own, num_rows, groups)
    sums = sums_behind(scales, num_rows, groups)
    prepare_rows(
        out.takes, table.attended + row_bytes * first_row, row_bytes, num_rows, 0, 0, 0, groups,
        table.eps, own, scales, sums, 0,
    )  # fmt: skip
    norm = of.attention_out_norm
    turn = add_output(table, out, norm, first_row, num_rows, own, scales, sums, groups, 0, part, parts, turn)
    if of.experts and of.mlp_width:
        turn = run_both(table, layer, first_row, num_rows, part, parts, thread, turn, own)
    elif of.experts:
        turn = run_experts(of.experts.code, table, of, first_row, num_rows, part, parts, thread, turn, own)
    else:
        turn = run_mlp(table, layer, first_row, num_rows, part, parts, turn, own)
    if of.layer_input:
        turn = add_own_input(table, of, first_row, num_rows, part, parts, turn, own)
    copy_to, padded = of.copy_to, table.padded_width
    if (
        copy_to and part == 0
    ):  # other threads write to these hidden states only after this one has reached the next layer
        for at in range(4 * padded * first_row, 4 * padded * (first_row + num_rows), 4 * LANES):
            store(copy_to + at, load(table.hidden + at))
    return turn


@compiled
def run_layer(table: PassTable, layer: int, thread: int, turn: int, own: int) -> int:
    """Do a thread's part of a layer; return the next turn."""
    threads, barrier = table.num_threads, table.barrier
    first_row, num_rows, part, parts = 0, table.num_rows, thread, threads
    if shares_rows(table):
        first_row = share(num_rows, thread, threads)
        num_rows, part, parts = share(num_rows, thread + 1, threads) - first_row, 0, 1
    if layer == 0 and table.padded_input_width:
        make_layer_inputs(table, first_row, num_rows, part, parts, own)
    turn = begin_layer(table, layer, first_row, num_rows, part, parts, turn, own)
    turn = wait(barrier, threads, turn)
    states_code = layer_entry(table, layer).states_code
    if states_code:
        advance_states(states_code, table, layer, thread, own)
    elif layer_entry(table, layer).filter:
        convolve_part(table, layer, thread)
    else:
        attend_part(table, layer, thread, own)
    turn = wait(barrier, threads, turn)
    return end_layer(table, layer, first_row, num_rows, part, parts, thread, turn, own)


@separated
def run(code: int, table: PassTable, thread: int) -> None:
    """Do a thread's part of the pass that a table describes; all its threads must be under way at once.

    ``code`` is the address of this function.
    """
    threads, own = table.num_threads, table.rooms + thread * table.room_bytes
    turn = 1
    for layer in range(table.num_layers):
        turn = run_layer(table, layer, thread, turn, own)
    if shares_rows(table):
        turn = wait(table.barrier, threads, turn)
    num_chosen, groups = table.num_chosen, table.padded_width // GROUP
    scales = scales_behind(own, num_chosen, groups)
    sums = sums_behind(scales, num_chosen, groups)
    prepare_rows(
        table.output.takes, table.hidden, 4 * GROUP * groups, num_chosen,
        table.width, table.norm, table.centres, groups, table.eps, own,
        scales, sums, table.chosen_rows,
    )  # fmt: skip
    panels = table.num_outputs // PANEL
    first, last = share(panels, thread, threads), share(panels, thread + 1, threads)
    out, out_bytes = table.logits, 4 * PANEL * panels
    project(table.output, num_chosen, first, last, own, scales, sums, groups, out, out_bytes, 0)
    if table[PassTable.logit_cap]:
        cap_logits(table, first, last)
    wait(table.barrier, threads, turn)
