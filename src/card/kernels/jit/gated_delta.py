"""Layers of the gated delta rule: rows advance states, each from that of its parent, one after the other.

The cache holds the state of each head behind some rows of a text, and *records* of the rows behind those: what the
convolution takes in, and what a row wrote to the states. The *steps* of a pass say, for all layers alike, which row
advances a state or which record is repeated, from where to where: the state that is kept, or one of some places of a
thread for what may be dropped. A head takes all steps before the next one, so that its states stay near. Its thread
computes its query and key, too, though heads share them: nothing waits.

Rows, steps and heads beside a row change no bit of it, nor does it matter whether it advances a state or its record is
repeated. Records are copied to the cache only when all threads have read what lies there.
"""

from __future__ import annotations

import numpy as np

from card.kernels.jit.addresses import all_heads, attended_bytes, conv_entry, layer_entry, sources_of
from card.kernels.jit.delta_rule import advance, gates, repeat
from card.kernels.jit.rows import ONE, ZERO, rms_norm, silu
from card.kernels.jit.sharing import Work, share
from card.kernels.jit.tables import ConvTable, LayerTable, PassTable, StepTable
from card.kernels.jit.vectors import (
    LANES,
    compiled,
    fill,
    fma,
    load,
    load_float,
    load_int,
    separated,
    store,
    store_float,
    times,
    total,
)

# For states of a thread. A tree of 2^n rows needs n + 1, so that these are enough for 2^15 rows; one takes 64 KiB with
# heads of 128, and memory is taken for those alone that a tree has needed.
MOST_PLACES = 16
_LEAST_SQUARE = np.float32(1e-6)


def room_for_states(key_size: int, value_size: int) -> int:
    """Return the bytes that a thread needs for the states, query, key, value, gates and output of a head."""
    return 4 * (MOST_PLACES * key_size * value_size + 2 * key_size + 2 * value_size + 2 * LANES)


@compiled
def row_at(table: PassTable, layer: LayerTable, row: int) -> int:
    """Return where what is computed of a row lies: what the convolution takes in first."""
    return table.projected + 4 * layer.padded_head * all_heads(layer) * row


@compiled
def spare_bytes(layer: LayerTable) -> int:
    """Return the bytes of a row that lie before what it wrote to the states."""
    heads = layer.heads + 2 * layer.kv_heads + layer.more_heads
    return 4 * layer.padded_head * heads


@compiled
def inputs_bytes(layer: LayerTable) -> int:
    """Return the bytes of what the convolution takes in of a row."""
    return 4 * layer.padded_head * layer.heads


@compiled
def convolve(table: PassTable, layer: LayerTable, row: int, channel: int, count: int, out: int) -> None:
    """Write silu of the sums of some channels over a row's last ancestors, the oldest first, and itself."""
    inputs, width, num_taps = row_at(table, layer, row), inputs_bytes(layer), layer.num_taps
    sources = sources_of(table, row)
    for at in range(4 * channel, 4 * (channel + count), 4 * LANES):
        sums = fill(ZERO)
        for tap in range(num_taps - 1):
            source = load_int(sources + 8 * tap)
            if source:
                taken = row_at(table, layer, -1 - source) if source < 0 else source + layer.record_at
                sums = fma(load(layer.filter + width * tap + at), load(taken + at), sums)
        sums = fma(load(layer.filter + width * (num_taps - 1) + at), load(inputs + at), sums)
        store(out + at - 4 * channel, silu(sums))


@compiled
def shorten(x: int, size: int, parts: int) -> None:
    """Give a vector a length whose square is 1 / ``parts``, in place."""
    squares = fill(ZERO)
    for at in range(0, 4 * size, 4 * LANES):
        squares = fma(load(x + at), load(x + at), squares)
    factor = fill(np.sqrt(ONE / (np.float32(parts) * (total(squares) + _LEAST_SQUARE))))
    for at in range(0, 4 * size, 4 * LANES):
        store(x + at, times(load(x + at), factor))


@compiled
def key_head(layer: LayerTable, head: int) -> int:
    """Return the head of the key that a head of values has: its neighbours share one, or each n-th does."""
    if layer.is_tiled:
        return head % layer.key_heads
    return head * layer.key_heads // layer.value_heads


@compiled
def is_first(layer: LayerTable, head: int) -> int:
    """Return whether a head is the first one of those that share its key."""
    key = key_head(layer, head)
    return int(head == key) if layer.is_tiled else int(head == 0 or key_head(layer, head - 1) != key)


@compiled
def prepare_vectors(table: PassTable, layer: LayerTable, row: int, head: int, query: int, key: int, value: int) -> None:
    """Write a row's query, key and value of a head."""
    size, value_size, key_heads = layer.key_size, layer.value_size, layer.key_heads
    key_idx = key_head(layer, head)
    convolve(table, layer, row, size * key_idx, size, query)
    convolve(table, layer, row, size * (key_heads + key_idx), size, key)
    convolve(table, layer, row, 2 * size * key_heads + value_size * head, value_size, value)
    shorten(query, size, size)
    shorten(key, size, 1)


@compiled
def keep_copy(source: int, size: int, out: int) -> None:
    """Copy some floats, a multiple of LANES."""
    for at in range(0, 4 * size, 4 * LANES):
        store(out + at, load(source + at))


@compiled
def gate_output(table: PassTable, layer: LayerTable, row: int, head: int, x: int) -> None:
    """Write the norm of what a head gives, times silu of its gate, to where attention would be."""
    size, panel = layer.value_size, layer.padded_head
    gate = row_at(table, layer, row) + 4 * panel * (layer.heads + 2 * layer.kv_heads) + 4 * size * head
    out = table.attended + attended_bytes(layer) * row
    rms_norm(x, layer.delta_norm, x, size, size, table.eps)
    for at in range(0, 4 * size, 4 * LANES):
        store(out + 4 * size * head + at, times(load(x + at), silu(load(gate + at))))
    if head == layer.value_heads - 1:  # zeros behind: another layer may have had numbers there
        for at in range(4 * size * (head + 1), attended_bytes(layer), 4 * LANES):
            store(out + at, fill(ZERO))


@compiled
def advance_row(table: PassTable, layer: LayerTable, row: int, head: int, source: int, target: int, room: int) -> None:
    """Compute a head of a row: its output, the state behind it, and what it wrote."""
    size, value_size = layer.key_size, layer.value_size
    key = room + 4 * size
    value = key + 4 * size
    out = value + 4 * value_size
    decays = out + 4 * value_size
    betas = decays + 4 * LANES
    prepare_vectors(table, layer, row, head, room, key, value)
    group, lane = head // LANES * LANES, 4 * (head % LANES)
    before = row_at(table, layer, row) + inputs_bytes(layer) + 4 * group
    apart = 4 * layer.padded_head * layer.kv_heads
    gates(before + apart, before, layer.rates + 4 * group, layer.step_biases + 4 * group, LANES, decays, betas)
    written = row_at(table, layer, row) + spare_bytes(layer)
    deltas = written + 4 * size * layer.key_heads
    if is_first(layer, head):
        keep_copy(key, size, written + 4 * size * key_head(layer, head))
    decay = load_float(decays + lane)
    store_float(deltas + 4 * value_size * layer.value_heads + 4 * head, decay)
    advance(
        source, target, size, value_size, room, key, value, load_float(betas + lane), decay,
        deltas + 4 * value_size * head, out,
    )  # fmt: skip
    gate_output(table, layer, row, head, out)


@compiled
def repeat_row(layer: LayerTable, record: int, head: int, source: int, target: int) -> None:
    """Do to a state what the row of a record did."""
    size, value_size = layer.key_size, layer.value_size
    keys = record + layer.record_at + inputs_bytes(layer)
    deltas = keys + 4 * size * layer.key_heads
    decay = load_float(deltas + 4 * value_size * layer.value_heads + 4 * head)
    repeat(
        source, target, size, value_size, keys + 4 * size * key_head(layer, head), decay, deltas + 4 * value_size * head
    )


@compiled
def state_at(layer: LayerTable, head: int, named: int, room: int) -> int:
    """Return where a state lies that a step names: by its sequence, or as a place of the thread."""
    num_bytes = 4 * layer.key_size * layer.value_size
    if named < MOST_PLACES:
        return room + num_bytes * named
    return named + layer.state_at + num_bytes * head


@separated
def advance_states(code: int, table: PassTable, layer_idx: int, thread: int, room: int) -> None:
    """Do a thread's part of a layer's steps; ``code`` is the address of this function."""
    layer, threads = layer_entry(table, layer_idx), table.num_threads
    heads, state_size = layer.value_heads, layer.key_size * layer.value_size
    vectors, first = room + 4 * MOST_PLACES * state_size, table.steps
    last = first + 8 * StepTable.size * table.num_steps
    for head in range(share(heads, thread, threads), share(heads, thread + 1, threads)):
        for step in range(first, last, 8 * StepTable.size):
            source = state_at(layer, head, StepTable(step).source, room)
            target = state_at(layer, head, StepTable(step).target, room)
            if StepTable(step).record:
                repeat_row(layer, StepTable(step).record, head, source, target)
            else:
                advance_row(table, layer, StepTable(step).row, head, source, target, vectors)
            if StepTable(step).mark:
                keep_copy(target, state_size, state_at(layer, head, StepTable(step).mark, room))


@compiled
def keep_part(source: int, out: int, num_bytes: int, part: int, parts: int) -> None:
    """Copy a part of some bytes, a multiple of LANES floats."""
    count = num_bytes // (4 * LANES)
    for at in range(4 * LANES * share(count, part, parts), 4 * LANES * share(count, part + 1, parts), 4 * LANES):
        store(out + at, load(source + at))


@compiled
def keep_records(table: PassTable, layer: LayerTable, work: Work) -> None:
    """Copy a part of the records of some rows to the cache, of those that have a place there."""
    inputs, spare = inputs_bytes(layer), spare_bytes(layer)
    written = 4 * layer.padded_head * all_heads(layer) - spare
    for row in range(work.first_row, work.first_row + work.num_rows):
        for place in (ConvTable.recent, ConvTable.landmark):
            out = conv_entry(table, row)[place]
            if out:
                source, out_here = row_at(table, layer, row), out + layer.record_at
                keep_part(source, out_here, inputs, work.part, work.parts)
                keep_part(source + spare, out_here + inputs, written, work.part, work.parts)
