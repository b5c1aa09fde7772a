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

from card.kernels.jit import tables as t
from card.kernels.jit.delta_rule import advance, gates, repeat
from card.kernels.jit.rows import ONE, ZERO, rms_norm, silu
from card.kernels.jit.sharing import share
from card.kernels.jit.tables import all_heads, attended_bytes, entry, layer_entry, real_entry
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
def row_at(table: int, of: int, row: int) -> int:
    """Return where what is computed of a row lies: what the convolution takes in first."""
    return entry(table, t.PROJECTED) + 4 * entry(of, t.PADDED_HEAD) * all_heads(of) * row


@compiled
def spare_bytes(of: int) -> int:
    """Return the bytes of a row that lie before what it wrote to the states."""
    heads = entry(of, t.HEADS) + 2 * entry(of, t.KV_HEADS) + entry(of, t.MORE_HEADS)
    return 4 * entry(of, t.PADDED_HEAD) * heads


@compiled
def inputs_bytes(of: int) -> int:
    """Return the bytes of what the convolution takes in of a row."""
    return 4 * entry(of, t.PADDED_HEAD) * entry(of, t.HEADS)


@compiled
def convolve(table: int, of: int, row: int, channel: int, count: int, out: int) -> None:
    """Write silu of the sums of some channels over a row's last ancestors, the oldest first, and itself."""
    its, width, num_taps = row_at(table, of, row), inputs_bytes(of), entry(of, t.NUM_TAPS)
    sources = t.sources_of(table, row)
    for at in range(4 * channel, 4 * (channel + count), 4 * LANES):
        sums = fill(ZERO)
        for tap in range(num_taps - 1):
            source = load_int(sources + 8 * tap)
            if source:
                taken = row_at(table, of, -1 - source) if source < 0 else source + entry(of, t.RECORD_AT)
                sums = fma(load(entry(of, t.FILTER) + width * tap + at), load(taken + at), sums)
        sums = fma(load(entry(of, t.FILTER) + width * (num_taps - 1) + at), load(its + at), sums)
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
def key_head(of: int, head: int) -> int:
    """Return the head of the key that a head of values has: its neighbours share one, or each n-th does."""
    if entry(of, t.IS_TILED):
        return head % entry(of, t.KEY_HEADS)
    return head * entry(of, t.KEY_HEADS) // entry(of, t.VALUE_HEADS)


@compiled
def is_first(of: int, head: int) -> int:
    """Return whether a head is the first one of those that share its key."""
    its = key_head(of, head)
    return int(head == its) if entry(of, t.IS_TILED) else int(head == 0 or key_head(of, head - 1) != its)


@compiled
def prepare_vectors(table: int, of: int, row: int, head: int, query: int, key: int, value: int) -> None:
    """Write a row's query, key and value of a head."""
    size, value_size, key_heads = entry(of, t.KEY_SIZE), entry(of, t.VALUE_SIZE), entry(of, t.KEY_HEADS)
    its = key_head(of, head)
    convolve(table, of, row, size * its, size, query)
    convolve(table, of, row, size * (key_heads + its), size, key)
    convolve(table, of, row, 2 * size * key_heads + value_size * head, value_size, value)
    shorten(query, size, size)
    shorten(key, size, 1)


@compiled
def keep_copy(source: int, size: int, out: int) -> None:
    """Copy some floats, a multiple of LANES."""
    for at in range(0, 4 * size, 4 * LANES):
        store(out + at, load(source + at))


@compiled
def gate_output(table: int, of: int, row: int, head: int, x: int) -> None:
    """Write the norm of what a head gives, times silu of its gate, to where attention would be."""
    size, panel = entry(of, t.VALUE_SIZE), entry(of, t.PADDED_HEAD)
    gate = row_at(table, of, row) + 4 * panel * (entry(of, t.HEADS) + 2 * entry(of, t.KV_HEADS)) + 4 * size * head
    out = entry(table, t.ATTENDED) + attended_bytes(of) * row
    rms_norm(x, entry(of, t.OUT_NORM), x, size, size, real_entry(table, t.EPS))
    for at in range(0, 4 * size, 4 * LANES):
        store(out + 4 * size * head + at, times(load(x + at), silu(load(gate + at))))
    if head == entry(of, t.VALUE_HEADS) - 1:  # zeros behind: another layer may have had numbers there
        for at in range(4 * size * (head + 1), attended_bytes(of), 4 * LANES):
            store(out + at, fill(ZERO))


@compiled
def advance_row(table: int, of: int, row: int, head: int, source: int, target: int, room: int) -> None:
    """Compute a head of a row: its output, the state behind it, and what it wrote."""
    size, value_size = entry(of, t.KEY_SIZE), entry(of, t.VALUE_SIZE)
    key = room + 4 * size
    value = key + 4 * size
    out = value + 4 * value_size
    decays = out + 4 * value_size
    betas = decays + 4 * LANES
    prepare_vectors(table, of, row, head, room, key, value)
    group, lane = head // LANES * LANES, 4 * (head % LANES)
    before = row_at(table, of, row) + inputs_bytes(of) + 4 * group
    apart = 4 * entry(of, t.PADDED_HEAD) * entry(of, t.KV_HEADS)
    gates(
        before + apart, before, entry(of, t.RATES) + 4 * group, entry(of, t.STEP_BIASES) + 4 * group, LANES, decays,
        betas,
    )  # fmt: skip
    written = row_at(table, of, row) + spare_bytes(of)
    deltas = written + 4 * size * entry(of, t.KEY_HEADS)
    if is_first(of, head):
        keep_copy(key, size, written + 4 * size * key_head(of, head))
    decay = load_float(decays + lane)
    store_float(deltas + 4 * value_size * entry(of, t.VALUE_HEADS) + 4 * head, decay)
    advance(
        source, target, size, value_size, room, key, value, load_float(betas + lane), decay,
        deltas + 4 * value_size * head, out,
    )  # fmt: skip
    gate_output(table, of, row, head, out)


@compiled
def repeat_row(of: int, record: int, head: int, source: int, target: int) -> None:
    """Do to a state what the row of a record did."""
    size, value_size = entry(of, t.KEY_SIZE), entry(of, t.VALUE_SIZE)
    keys = record + entry(of, t.RECORD_AT) + inputs_bytes(of)
    deltas = keys + 4 * size * entry(of, t.KEY_HEADS)
    decay = load_float(deltas + 4 * value_size * entry(of, t.VALUE_HEADS) + 4 * head)
    repeat(
        source, target, size, value_size, keys + 4 * size * key_head(of, head), decay, deltas + 4 * value_size * head
    )


@compiled
def state_at(of: int, head: int, named: int, room: int) -> int:
    """Return where a state lies that a step names: by its sequence, or as a place of the thread."""
    num_bytes = 4 * entry(of, t.KEY_SIZE) * entry(of, t.VALUE_SIZE)
    if named < MOST_PLACES:
        return room + num_bytes * named
    return named + entry(of, t.STATE_AT) + num_bytes * head


@separated
def advance_states(code: int, table: int, layer: int, thread: int, room: int) -> None:
    """Do a thread's part of a layer's steps; ``code`` is the address of this function."""
    of, threads = layer_entry(table, layer), entry(table, t.THREADS)
    heads, state_size = entry(of, t.VALUE_HEADS), entry(of, t.KEY_SIZE) * entry(of, t.VALUE_SIZE)
    own, first = room + 4 * MOST_PLACES * state_size, entry(table, t.STEPS)
    last = first + 8 * t.STEP_SIZE * entry(table, t.NUM_STEPS)
    for head in range(share(heads, thread, threads), share(heads, thread + 1, threads)):
        for step in range(first, last, 8 * t.STEP_SIZE):
            source = state_at(of, head, entry(step, t.STEP_FROM), room)
            target = state_at(of, head, entry(step, t.STEP_TO), room)
            if entry(step, t.STEP_RECORD):
                repeat_row(of, entry(step, t.STEP_RECORD), head, source, target)
            else:
                advance_row(table, of, entry(step, t.STEP_ROW), head, source, target, own)
            if entry(step, t.STEP_MARK):
                keep_copy(target, state_size, state_at(of, head, entry(step, t.STEP_MARK), room))


@compiled
def keep_part(source: int, out: int, num_bytes: int, part: int, parts: int) -> None:
    """Copy a part of some bytes, a multiple of LANES floats."""
    count = num_bytes // (4 * LANES)
    for at in range(4 * LANES * share(count, part, parts), 4 * LANES * share(count, part + 1, parts), 4 * LANES):
        store(out + at, load(source + at))


@compiled
def keep_records(table: int, of: int, first_row: int, num_rows: int, part: int, parts: int) -> None:
    """Copy a part of the records of some rows to the cache, of those that have a place there."""
    inputs, spare = inputs_bytes(of), spare_bytes(of)
    written = 4 * entry(of, t.PADDED_HEAD) * all_heads(of) - spare
    for row in range(first_row, first_row + num_rows):
        for place in (t.RECENT, t.LANDMARK):
            out = entry(t.input_entry(table, row), place)
            if out:
                its, out_here = row_at(table, of, row), out + entry(of, t.RECORD_AT)
                keep_part(its, out_here, inputs, part, parts)
                keep_part(its + spare, out_here + inputs, written, part, parts)
