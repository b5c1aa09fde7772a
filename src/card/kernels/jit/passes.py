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
from card.kernels.jit.layer_inputs import gate_layer_input, layer_input_at, layer_inputs_bytes, make_layer_inputs
from card.kernels.jit.rows import (
    Activations,
    Output,
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
from card.kernels.jit.sharing import Work, share, shares_rows, wait
from card.kernels.jit.short_conv import convolve_part
from card.kernels.jit.tables import LayerTable, LinearEntry, PassTable
from card.kernels.jit.tiles import MOST_ROWS, PANEL
from card.kernels.jit.vectors import GROUP, LANES, SUMS_BYTES, compiled, fill, load, load_float, separated, store


@compiled
def gated_bytes(table: PassTable, layer: LayerTable, first_row: int) -> int:
    """Return where the gated activations of rows from ``first_row`` on lie as bytes, in the layer of a table."""
    return table.gated + layer.mlp_width * first_row


@compiled
def gated_scales(table: PassTable, layer: LayerTable, first_row: int) -> int:
    """Return where their scales lie."""
    return table.gated_scales + 4 * (layer.mlp_width // GROUP) * first_row


@compiled
def gated_sums(table: PassTable, layer: LayerTable, first_row: int) -> int:
    """Return where their sums lie, with room behind those of any number of rows for these as floats."""
    return table.gated_sums + (SUMS_BYTES + 4 * GROUP) * (layer.mlp_width // GROUP) * first_row


@compiled
def gate(table: PassTable, layer_idx: int, work: Work, inputs: Activations) -> None:
    """Compute a part of activation(gate) * up for some rows, and prepare it."""
    layer, num_groups = layer_entry(table, layer_idx), table.padded_width // GROUP
    room, num_out = room_behind(inputs.sums, work.num_rows, num_groups), layer.mlp_width // GROUP
    for group in range(share(num_out, work.part, work.parts), share(num_out, work.part + 1, work.parts)):
        gate_tiles(
            table, layer.gate, layer.up, layer.down.takes, group, num_out, work.num_rows, inputs, room,
            Activations(
                gated_bytes(table, layer, work.first_row), gated_scales(table, layer, work.first_row),
                gated_sums(table, layer, work.first_row),
            ),
            room + 8 * GROUP * MOST_ROWS,
        )  # fmt: skip


@compiled
def project_heads(
    table: PassTable, layer: LayerTable, linear: LinearEntry, count: int, before: int, first: int, last: int,
    first_row: int, num_rows: int, inputs: Activations,
) -> None:  # fmt: skip
    """Compute those heads of a linear layer, for some rows, that are among ``first`` to ``last`` of all.

    Args:
        count, before: heads of this linear layer, and of those before it.
    """
    padded = layer.padded_head
    start, stop, row_bytes = max(first - before, 0), min(last - before, count), 4 * padded * all_heads(layer)
    out = table.projected + row_bytes * first_row + 4 * padded * before
    project(
        linear, num_rows, padded // PANEL * start, padded // PANEL * stop, inputs,
        table.padded_width // GROUP, Output(out, row_bytes, layer.adds_heads),
        room_behind(inputs.sums, num_rows, table.padded_width // GROUP),
    )  # fmt: skip


@compiled
def add_output(
    table: PassTable, linear: LinearEntry, norm: int, first_row: int, num_rows: int, inputs: Activations,
    num_groups: int, factor: int, part: int, parts: int, turn: int, room: int,
) -> int:  # fmt: skip
    """Add a part of what a block computes for some rows to the hidden states; return the next turn.

    Args:
        norm: address of the weight of a norm to apply first; 0: none. A norm reads whole rows, so with one each thread
            takes some of the rows, instead of some channels of all.
        factor: address of a float that scales the sums, where there is a norm; 0: none.
        room: for expanded panels.
    """
    barrier, padded = table.barrier, table.padded_width
    before = 4 * padded * first_row
    hidden, added = table.hidden + before, table.added + before
    first, last = share(padded // PANEL, part, parts), share(padded // PANEL, part + 1, parts)
    if not norm:
        project(linear, num_rows, first, last, inputs, num_groups, Output(hidden, 4 * padded, 1), room)
        return wait(barrier, parts, turn)
    project(linear, num_rows, first, last, inputs, num_groups, Output(added, 4 * padded, 0), room)
    turn = wait(barrier, parts, turn)
    for row in range(part, num_rows, parts):
        x = added + 4 * padded * row
        rms_norm(x, norm, x, table.width, padded, table.eps)
        add_row(x, hidden + 4 * padded * row, padded)
        if factor:
            scale_row(hidden + 4 * padded * row, load_float(factor), padded)
    return wait(barrier, parts, turn)


@compiled
def cap_logits(table: PassTable, first: int, last: int) -> None:
    """Bound panels ``first`` to ``last`` of all logits."""
    num_bytes, cap = 4 * table.num_outputs, fill(table.logit_cap)
    for row in range(table.num_chosen):
        logits = table.logits + num_bytes * row
        for at in range(logits + 4 * PANEL * first, logits + 4 * PANEL * last, 4 * LANES):
            store(at, capped(load(at), cap))


@compiled
def begin_layer(table: PassTable, layer_idx: int, work: Work, turn: int, scratch: int) -> int:
    """Compute a part of queries, keys and values of some rows, and return the next turn."""
    layer, groups, barrier = layer_entry(table, layer_idx), table.padded_width // GROUP, table.barrier
    heads, kv_heads, is_parallel = layer.heads, layer.made_kv_heads, table.is_parallel
    more, attending = layer.more_heads, heads + 2 * kv_heads
    scales = scales_behind(scratch, work.num_rows, groups)
    sums = sums_behind(scales, work.num_rows, groups)
    takes = layer.query.takes | layer.key.takes | layer.value.takes
    takes |= layer.more.takes
    if is_parallel:  # the MLP reads what attention reads
        takes |= layer.gate.takes | layer.up.takes
    prepare_input(table, takes, layer.input_norm, work.first_row, work.num_rows, Activations(scratch, scales, sums))
    first, last = share(attending + more, work.part, work.parts), share(attending + more, work.part + 1, work.parts)
    for linear, count, before in (
        (layer.query, heads, 0), (layer.key, kv_heads, heads), (layer.value, kv_heads, heads + kv_heads),
        (layer.more, more, attending),
    ):  # fmt: skip
        project_heads(
            table,
            layer,
            linear,
            count,
            before,
            first,
            last,
            work.first_row,
            work.num_rows,
            Activations(scratch, scales, sums),
        )
    if table.has_wide_norms:
        turn = wait(barrier, work.parts, turn)
        for row in range(work.first_row + work.part, work.first_row + work.num_rows, work.parts):
            norm_all_heads(table, layer_idx, row)
        turn = wait(barrier, work.parts, turn)
    if not layer.filter:
        prepare_heads(table, layer_idx, work.first_row, work.first_row + work.num_rows, first, min(last, attending))
    if is_parallel:
        gate(table, layer_idx, work, Activations(scratch, scales, sums))
    return turn


@compiled
def gate_mlp(table: PassTable, layer_idx: int, work: Work, turn: int, scratch: int) -> int:
    """Compute a part of the gate of the MLP of some rows; return the next turn."""
    layer, groups = layer_entry(table, layer_idx), table.padded_width // GROUP
    scales = scales_behind(scratch, work.num_rows, groups)
    sums = sums_behind(scales, work.num_rows, groups)
    takes = layer.gate.takes | layer.up.takes
    prepare_input(table, takes, layer.mlp_norm, work.first_row, work.num_rows, Activations(scratch, scales, sums))
    gate(table, layer_idx, work, Activations(scratch, scales, sums))
    return wait(table.barrier, work.parts, turn)


@compiled
def run_mlp(table: PassTable, layer_idx: int, work: Work, turn: int, scratch: int) -> int:
    """Compute a part of the MLP of some rows, or of what it adds if its gate is done; return the next turn."""
    layer = layer_entry(table, layer_idx)
    if not table.is_parallel:
        turn = gate_mlp(table, layer_idx, work, turn, scratch)
    return add_output(
        table, layer.down, layer.mlp_out_norm, work.first_row, work.num_rows,
        Activations(
            gated_bytes(table, layer, work.first_row), gated_scales(table, layer, work.first_row),
            gated_sums(table, layer, work.first_row),
        ),
        layer.mlp_width // GROUP, layer.factor, work.part, work.parts, turn, scratch,
    )  # fmt: skip


@compiled
def add_both(table: PassTable, layer: LayerTable, row: int) -> None:
    """Add to a row what an MLP and the experts beside it give, each normed and then both together."""
    experts, padded, eps = layer.experts, table.padded_width, table.eps
    width, before = table.width, 4 * padded * row
    added, others, hidden = (table.added + before, table.expert_sums + before, table.hidden + before)
    rms_norm(added, experts.mlp_norm, added, width, padded, eps)
    rms_norm(others, experts.output_norm, others, width, padded, eps)
    add_row(others, added, padded)
    rms_norm(added, layer.mlp_out_norm, added, width, padded, eps)
    add_row(added, hidden, padded)
    if layer.factor:
        scale_row(hidden, load_float(layer.factor), padded)


@compiled
def run_both(table: PassTable, layer_idx: int, work: Work, thread: int, turn: int, scratch: int) -> int:
    """Compute a part of an MLP and of the experts beside it; return the next turn."""
    layer, padded = layer_entry(table, layer_idx), table.padded_width
    turn = gate_mlp(table, layer_idx, work, turn, scratch)
    project(
        layer.down, work.num_rows,
        share(padded // PANEL, work.part, work.parts), share(padded // PANEL, work.part + 1, work.parts),
        Activations(
            gated_bytes(table, layer, work.first_row), gated_scales(table, layer, work.first_row),
            gated_sums(table, layer, work.first_row),
        ),
        layer.mlp_width // GROUP, Output(table.added + 4 * padded * work.first_row, 4 * padded, 0), scratch,
    )  # fmt: skip
    turn = run_experts(layer.experts.code, table, layer, work, thread, turn, scratch)
    for row in range(work.first_row + work.part, work.first_row + work.num_rows, work.parts):
        add_both(table, layer, row)
    return wait(table.barrier, work.parts, turn)


@compiled
def add_layer_input(table: PassTable, layer: LayerTable, work: Work, turn: int, scratch: int) -> int:
    """Add a part of what the numbers give that tokens have for a layer; return the next turn."""
    layer_input, num_groups = layer.layer_input, table.padded_input_width // GROUP
    gate_layer_input(table, layer_input, work, scratch)
    turn = wait(table.barrier, work.parts, turn)
    scales = scales_behind(scratch, work.num_rows, num_groups)
    sums = sums_behind(scales, work.num_rows, num_groups)
    prepare_rows(
        layer_input.out.takes, layer_input_at(table, layer_input, work.first_row), layer_inputs_bytes(table),
        work.num_rows, 0, 0, 0, num_groups, table.eps, Activations(scratch, scales, sums), 0,
    )  # fmt: skip
    return add_output(
        table, layer_input.out, layer_input.norm, work.first_row, work.num_rows, Activations(scratch, scales, sums),
        num_groups, layer_input.factor, work.part, work.parts, turn, room_behind(sums, work.num_rows, num_groups),
    )  # fmt: skip


@compiled
def end_layer(table: PassTable, layer_idx: int, work: Work, thread: int, turn: int, scratch: int) -> int:
    """Compute a part of what follows attention, of some rows, and return the next turn."""
    layer = layer_entry(table, layer_idx)
    if layer.key_size:
        keep_records(table, layer, work)
        if shares_rows(table):  # rows are of another size in the next layer, so that a thread's lie where others' were
            turn = wait(table.barrier, table.num_threads, turn)
    row_bytes = attended_bytes(layer)
    groups, out = row_bytes // (4 * GROUP), layer.attention_out
    scales = scales_behind(scratch, work.num_rows, groups)
    sums = sums_behind(scales, work.num_rows, groups)
    prepare_rows(
        out.takes, table.attended + row_bytes * work.first_row, row_bytes, work.num_rows, 0, 0, 0, groups,
        table.eps, Activations(scratch, scales, sums), 0,
    )  # fmt: skip
    norm = layer.attention_out_norm
    turn = add_output(
        table,
        out,
        norm,
        work.first_row,
        work.num_rows,
        Activations(scratch, scales, sums),
        groups,
        0,
        work.part,
        work.parts,
        turn,
        room_behind(sums, work.num_rows, groups),
    )
    if layer.experts and layer.mlp_width:
        turn = run_both(table, layer_idx, work, thread, turn, scratch)
    elif layer.experts:
        turn = run_experts(layer.experts.code, table, layer, work, thread, turn, scratch)
    else:
        turn = run_mlp(table, layer_idx, work, turn, scratch)
    if layer.layer_input:
        turn = add_layer_input(table, layer, work, turn, scratch)
    copy_to, padded = layer.copy_to, table.padded_width
    if (
        copy_to and work.part == 0
    ):  # other threads write to these hidden states only after this one has reached the next layer
        for at in range(4 * padded * work.first_row, 4 * padded * (work.first_row + work.num_rows), 4 * LANES):
            store(copy_to + at, load(table.hidden + at))
    return turn


@compiled
def run_layer(table: PassTable, layer_idx: int, thread: int, turn: int, scratch: int) -> int:
    """Do a thread's part of a layer; return the next turn."""
    threads, barrier = table.num_threads, table.barrier
    first_row, num_rows, part, parts = 0, table.num_rows, thread, threads
    if shares_rows(table):
        first_row = share(num_rows, thread, threads)
        num_rows, part, parts = share(num_rows, thread + 1, threads) - first_row, 0, 1
    if layer_idx == 0 and table.padded_input_width:
        make_layer_inputs(table, Work(first_row, num_rows, part, parts), scratch)
    turn = begin_layer(table, layer_idx, Work(first_row, num_rows, part, parts), turn, scratch)
    turn = wait(barrier, threads, turn)
    if table.keeps_alone and layer_idx == table.num_layers - 1:
        return turn
    states_code = layer_entry(table, layer_idx).states_code
    if states_code:
        advance_states(states_code, table, layer_idx, thread, scratch)
    elif layer_entry(table, layer_idx).filter:
        convolve_part(table, layer_idx, thread)
    else:
        attend_part(table, layer_idx, thread, scratch)
    turn = wait(barrier, threads, turn)
    return end_layer(table, layer_idx, Work(first_row, num_rows, part, parts), thread, turn, scratch)


@separated
def run(code: int, table: PassTable, thread: int) -> None:
    """Do a thread's part of the pass that a table describes; all its threads must be under way at once.

    ``code`` is the address of this function.
    """
    threads, scratch = table.num_threads, table.scratch + thread * table.scratch_bytes
    turn = 1
    for layer_idx in range(table.first_layer, table.num_layers):
        turn = run_layer(table, layer_idx, thread, turn, scratch)
    if shares_rows(table):
        turn = wait(table.barrier, threads, turn)
    num_chosen, groups = table.num_chosen, table.padded_width // GROUP
    scales = scales_behind(scratch, num_chosen, groups)
    sums = sums_behind(scales, num_chosen, groups)
    prepare_rows(
        table.output.takes, table.hidden, 4 * GROUP * groups, num_chosen,
        table.width, table.norm, table.centres, groups, table.eps,
        Activations(scratch, scales, sums), table.chosen_rows,
    )  # fmt: skip
    panels = table.num_outputs // PANEL
    first, last = share(panels, thread, threads), share(panels, thread + 1, threads)
    out, out_bytes = table.logits, 4 * PANEL * panels
    project(
        table.output, num_chosen, first, last, Activations(scratch, scales, sums), groups, Output(out, out_bytes, 0),
        room_behind(sums, num_chosen, groups),
    )  # fmt: skip
    if table[PassTable.logit_cap]:
        cap_logits(table, first, last)
    wait(table.barrier, threads, turn)
