"""One pass of a Llama-like decoder as one call: norms, products, rotation, attention, all layers, all rows.

Each row is computed alone: the order of its sums is that of the positions of its own text, of the channels or of the
groups, whatever the rows beside it, its place in the cache, the tile or the thread. Threads share out output channels and
heads, and wait for each other five times a layer.

A pass gets the address of a table of integers, most of them addresses. Their places are named below.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from card.models.jit.tiles import MOST_ROWS, PANEL, multiply
from card.models.jit.vectors import (
    GROUP,
    LANES,
    add,
    arrive,
    divide,
    fill,
    fma,
    largest,
    let_others_run,
    load,
    load_float,
    load_halves,
    load_int,
    look,
    maximum,
    minimum,
    multiply as times,
    pause,
    quantize_group,
    rounded,
    store,
    store_float,
    store_halves,
    total,
    two_to_the,
)

# Places in the table of a pass.
(
    ROWS, THREADS, LAYERS, WIDTH, PADDED_WIDTH, HEADS, KV_HEADS, HEAD, PADDED_HEAD, MLP, VOCAB, LAYER_TABLE, NORM,
    OUTPUT, _OUTPUT_SCALES, _OUTPUT_BIASES, EPS, SCALE, COS, SIN, ROW_TABLE, ANCESTORS, HIDDEN, PROJECTED, ATTENDED, GATED, GATED_SCALES, GATED_STARTS,
    OWN, OWN_BYTES, BARRIER, CHOSEN_ROWS, NUM_CHOSEN, LOGITS, TABLE_SIZE,
) = range(35)  # fmt: skip
# Places in the table of a layer; a linear layer takes three: panels, channel scales, biases.
INPUT_NORM, QKV, QUERY_NORM, KEY_NORM, ATTENTION_OUT, MLP_NORM, GATE, UP, DOWN, WINDOW, COPY_TO, LAYER_SIZE = (
    0, 1, 4, 5, 6, 9, 10, 13, 16, 19, 20, 21,
)  # fmt: skip
# Places in the table of a row: where its keys and values of layer 0 go, bytes between rows, KV heads and layers, the
# position, rows of the prefix that it sees, the first of its ancestors beyond them, whether it has logits.
KV, KV_ROW, HEAD_BYTES, LAYER_BYTES, SLOT, POSITION, PREFIX, FIRST_ANCESTOR, ROW_SIZE = range(9)

_PATIENCE = 2000  # looks at the barrier before the core is given away
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST, _ONE, _MINUS = np.float32(-87.0), np.float32(88.0), np.float32(1.0), np.float32(-1.0)
_NOTHING = np.float32(-3.0e38)
_E = tuple(np.float32(x) for x in (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666665e-1, 0.5))
_E0, _E1, _E2, _E3, _E4, _E5 = _E
_i64, _f32 = types.int64, types.float32


@njit(nogil=True, cache=True)
def exponential(x):
    """Return e^x of 16 floats, of those from -87 to 88 (others count as these); after Cody and Waite, with Cephes' polynomial."""
    x = minimum(maximum(x, fill(_LEAST)), fill(_MOST))
    whole = rounded(times(x, fill(_LOG2_E)))
    rest = fma(whole, fill(-_LN2_HIGH), x)
    rest = fma(whole, fill(-_LN2_LOW), rest)
    y = fma(fill(_E0), rest, fill(_E1))
    y = fma(y, rest, fill(_E2))
    y = fma(y, rest, fill(_E3))
    y = fma(y, rest, fill(_E4))
    y = fma(y, rest, fill(_E5))
    y = add(fma(times(rest, rest), y, rest), fill(_ONE))
    return times(y, two_to_the(whole))


@njit(_i64(_i64, _i64, _i64), nogil=True, cache=True)
def wait(counter, num_threads, turn):
    """Wait until all threads have come so far; return the next turn."""
    if num_threads > 1:
        arrive(counter)
        looks = 0
        while look(counter) < num_threads * turn:
            looks += 1
            if looks > _PATIENCE:
                let_others_run()
            else:
                pause()
    return turn + 1


@njit(_i64(_i64, _i64), nogil=True, cache=True)
def tile_size(num_rows, first):
    """Return how many rows the tile that starts at a row has: as few tiles as can be, of nearly one size."""
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    size = num_rows // num_tiles
    num_larger = num_rows % num_tiles
    return size + 1 if first < num_larger * (size + 1) else size


@njit(types.void(_i64, _i64, _i64, _i64, _i64, _f32), nogil=True, cache=True)
def rms_norm(x, weight, out, width, padded, eps):
    """Write the norm of a row of ``width``; padding must be 0, and stays so."""
    squares = fill(np.float32(0.0))
    end = 4 * padded
    for at in range(0, end, 4 * LANES):
        one = load(x + at)
        squares = fma(one, one, squares)
    factor = fill(_ONE / np.sqrt(total(squares) / np.float32(width) + eps))
    for at in range(0, end, 4 * LANES):
        store(out + at, times(times(load(x + at), factor), load(weight + at)))


@njit(types.void(_i64, _i64, _i64, _i64, _i64, _i64), nogil=True, cache=True)
def quantize_row(x, numbers, scales, starts, num_groups, rows_of_tile):
    """Quantize a row into its place in a tile."""
    for group in range(num_groups):
        at = 4 * group * rows_of_tile
        quantize_group(
            x + 4 * GROUP * group, numbers + GROUP * group * rows_of_tile, 4 * rows_of_tile, scales + at, starts + at
        )


@njit(types.void(_i64, _i64, _i64, _i64, _i64, _i64, _f32, _i64, _i64, _i64, _i64), nogil=True, cache=True)
def quantize_rows(x, x_bytes, num_rows, width, norm, num_groups, eps, numbers, scales, starts, chosen):
    """Quantize rows tile after tile; behind ``starts`` is room for a row.

    Args:
        norm: weight of a norm to apply first; 0 for none.
        chosen: address of the rows' indices; 0 for all rows in their order.
    """
    room = starts + 4 * num_rows * num_groups
    first = 0
    while first < num_rows:
        size = tile_size(num_rows, first)
        for row in range(size):
            source = x + (load_int(chosen + 8 * (first + row)) if chosen else first + row) * x_bytes
            if norm:
                rms_norm(source, norm, room, width, GROUP * num_groups, eps)
                source = room
            at = 4 * (first * num_groups + row)
            quantize_row(
                source, numbers + GROUP * first * num_groups + 4 * row, scales + at, starts + at, num_groups, size
            )
        first += size


@njit(types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64), nogil=True, cache=True)
def project(linear, num_rows, start, stop, numbers, scales, starts, num_groups, out, out_bytes, adds):
    """Multiply all rows by panels ``start`` to ``stop`` of a linear layer, whose table entry is given."""
    panels, channel_scales, biases = load_int(linear), load_int(linear + 8), load_int(linear + 16)
    at = start
    while at < stop:
        end = min(at + 4, stop)  # few enough that they stay in the core's cache for the next tile
        first = 0
        while first < num_rows:
            size = tile_size(num_rows, first)
            before = first * num_groups
            multiply(
                size, at, end, panels, PANEL * GROUP * num_groups, numbers + GROUP * before, scales + 4 * before,
                starts + 4 * before, num_groups, channel_scales, biases, out + first * out_bytes, out_bytes, adds,
            )  # fmt: skip
            first += size
        at = end


@njit(types.void(_i64, _i64, _i64, _i64, _i64, _i64, _f32), nogil=True, cache=True)
def norm_and_turn(x, norm, cos, sin, size, padded, eps):
    """Norm a head in place if ``norm`` is a weight, and turn it by its position."""
    if norm:
        rms_norm(x, norm, x, size, padded, eps)
    half = 4 * (size // 2)
    at = 0
    while at + 4 * LANES <= half:
        low, high = load(x + at), load(x + half + at)
        store(x + at, fma(low, load(cos + at), times(times(high, load(sin + at)), fill(_MINUS))))
        store(x + half + at, fma(high, load(cos + half + at), times(low, load(sin + half + at))))
        at += 4 * LANES
    for at in range(at, half, 4):
        low, high = load_float(x + at), load_float(x + half + at)
        store_float(x + at, low * load_float(cos + at) - high * load_float(sin + at))
        store_float(x + half + at, high * load_float(cos + half + at) + low * load_float(sin + half + at))


@njit(types.void(_i64, _i64, _i64, _i64), nogil=True, cache=True)
def prepare_heads(table, layer, first, last):
    """Norm and turn heads ``first`` to ``last`` (queries, keys, values) of all rows; keep keys and values."""
    of = load_int(table + 8 * LAYER_TABLE) + 8 * LAYER_SIZE * layer
    heads, kv_heads = load_int(table + 8 * HEADS), load_int(table + 8 * KV_HEADS)
    size, padded = load_int(table + 8 * HEAD), load_int(table + 8 * PADDED_HEAD)
    row_bytes = 4 * padded * (heads + 2 * kv_heads)
    eps = load_float(table + 8 * EPS)
    rows = load_int(table + 8 * ROW_TABLE)
    for row in range(load_int(table + 8 * ROWS)):
        entry = rows + 8 * ROW_SIZE * row
        turn = 4 * size * load_int(entry + 8 * POSITION)
        cos, sin = load_int(table + 8 * COS) + turn, load_int(table + 8 * SIN) + turn
        kept = load_int(entry + 8 * KV) + layer * load_int(entry + 8 * LAYER_BYTES)
        kept += load_int(entry + 8 * SLOT) * load_int(entry + 8 * KV_ROW)
        for head in range(first, last):
            x = load_int(table + 8 * PROJECTED) + row * row_bytes + 4 * padded * head
            if head < heads:
                norm_and_turn(x, load_int(of + 8 * QUERY_NORM), cos, sin, size, padded, eps)
                continue
            if head < heads + kv_heads:
                norm_and_turn(x, load_int(of + 8 * KEY_NORM), cos, sin, size, padded, eps)
            out = kept + (head - heads) * load_int(entry + 8 * HEAD_BYTES)
            for at in range(0, padded, LANES):
                store_halves(out + 2 * at, load(x + 4 * at))


@njit(_i64(_i64, _i64, _i64, _i64), nogil=True, cache=True)
def row_at(position, prefix, ancestors, row_bytes):
    """Return how far into the cache the row lies that holds a position of a text."""
    row = position if position < prefix else load_int(ancestors + 8 * (position - prefix))
    return row * row_bytes


@njit(types.void(_i64, _i64), nogil=True, cache=True)
def weigh(scores, seen):
    """Turn scores into weights whose sum is 1, in place."""
    end = 4 * seen
    width = 4 * ((seen + LANES - 1) // LANES * LANES)
    for at in range(end, width, 4):
        store_float(scores + at, _NOTHING)
    most = load(scores)
    for at in range(4 * LANES, width, 4 * LANES):
        most = maximum(most, load(scores + at))
    top = fill(-largest(most))
    sums = fill(np.float32(0.0))
    for at in range(0, width, 4 * LANES):
        weight = exponential(add(load(scores + at), top))
        if at + 4 * LANES > end:  # the last lanes hold nothing
            store(scores + at, weight)
            for lane in range(end, width, 4):
                store_float(scores + lane, np.float32(0.0))
            weight = load(scores + at)
        store(scores + at, weight)
        sums = add(sums, weight)
    share = fill(_ONE / total(sums))
    for at in range(0, width, 4 * LANES):
        store(scores + at, times(load(scores + at), share))


@njit(types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64), nogil=True, cache=True)
def weighted_sum(weights, values, out, start, stop, padded, prefix, ancestors, row_bytes):
    """Write the sum of values times weights, in the order of positions."""
    at = 0
    while at + 4 * LANES <= padded:
        a = b = c = d = fill(np.float32(0.0))
        for position in range(start, stop):
            value = values + row_at(position, prefix, ancestors, row_bytes) + 2 * at
            weight = fill(load_float(weights + 4 * (position - start)))
            a = fma(weight, load_halves(value), a)
            b = fma(weight, load_halves(value + 2 * LANES), b)
            c = fma(weight, load_halves(value + 4 * LANES), c)
            d = fma(weight, load_halves(value + 6 * LANES), d)
        store(out + 4 * at, a)
        store(out + 4 * (at + LANES), b)
        store(out + 4 * (at + 2 * LANES), c)
        store(out + 4 * (at + 3 * LANES), d)
        at += 4 * LANES
    while at < padded:
        a = fill(np.float32(0.0))
        for position in range(start, stop):
            value = values + row_at(position, prefix, ancestors, row_bytes) + 2 * at
            a = fma(fill(load_float(weights + 4 * (position - start))), load_halves(value), a)
        store(out + 4 * at, a)
        at += LANES


@njit(types.void(_i64, _i64, _i64, _i64, _i64), nogil=True, cache=True)
def attend(table, layer, row, kv_head, room):
    """Write the attention of a row's query heads that share a KV head; ``room`` holds a score for each position."""
    of = load_int(table + 8 * LAYER_TABLE) + 8 * LAYER_SIZE * layer
    heads, kv_heads = load_int(table + 8 * HEADS), load_int(table + 8 * KV_HEADS)
    padded, group = load_int(table + 8 * PADDED_HEAD), heads // kv_heads
    entry = load_int(table + 8 * ROW_TABLE) + 8 * ROW_SIZE * row
    row_bytes, prefix = load_int(entry + 8 * KV_ROW), load_int(entry + 8 * PREFIX)
    ancestors = load_int(table + 8 * ANCESTORS) + 8 * load_int(entry + 8 * FIRST_ANCESTOR)
    stop = load_int(entry + 8 * POSITION) + 1
    window = load_int(of + 8 * WINDOW)
    start = max(0, stop - window) if window else 0
    seen = stop - start
    width = 4 * ((seen + LANES - 1) // LANES * LANES)
    keys = load_int(entry + 8 * KV) + layer * load_int(entry + 8 * LAYER_BYTES)
    keys += kv_head * load_int(entry + 8 * HEAD_BYTES)
    values = keys + kv_heads * load_int(entry + 8 * HEAD_BYTES)
    first = kv_head * group
    query = load_int(table + 8 * PROJECTED) + 4 * padded * (row * (heads + 2 * kv_heads) + first)
    scale = load_float(table + 8 * SCALE)
    for position in range(start, stop):
        key = keys + row_at(position, prefix, ancestors, row_bytes)
        for one in range(group):
            score = times(load(query + 4 * padded * one), load_halves(key))
            for at in range(LANES, padded, LANES):
                score = fma(load(query + 4 * (padded * one + at)), load_halves(key + 2 * at), score)
            store_float(room + width * one + 4 * (position - start), total(score) * scale)
    attended_bytes = 4 * ((heads * padded + GROUP - 1) // GROUP * GROUP)
    out = load_int(table + 8 * ATTENDED) + row * attended_bytes + 4 * padded * first
    for one in range(group):
        weigh(room + width * one, seen)
        weighted_sum(room + width * one, values, out + 4 * padded * one, start, stop, padded, prefix, ancestors, row_bytes)


@njit(types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64), nogil=True, cache=True)
def gate(table, layer, start, stop, numbers, scales, starts, room):
    """Compute groups ``start`` to ``stop`` of silu(gate) * up for all rows, and quantize them."""
    of = load_int(table + 8 * LAYER_TABLE) + 8 * LAYER_SIZE * layer
    num_rows, num_groups = load_int(table + 8 * ROWS), load_int(table + 8 * PADDED_WIDTH) // GROUP
    num_out = load_int(table + 8 * MLP) // GROUP
    per_group = GROUP // PANEL
    other = room + 4 * GROUP * MOST_ROWS
    one = fill(_ONE)
    for group in range(start, stop):
        first = 0
        while first < num_rows:
            size = tile_size(num_rows, first)
            before = first * num_groups
            for linear, out in ((of + 8 * GATE, room), (of + 8 * UP, other)):
                multiply(
                    size, 0, per_group, load_int(linear) + group * per_group * PANEL * GROUP * num_groups,
                    PANEL * GROUP * num_groups, numbers + GROUP * before, scales + 4 * before, starts + 4 * before,
                    num_groups, load_int(linear + 8) + 4 * GROUP * group, load_int(linear + 16) + 4 * GROUP * group,
                    out, 4 * GROUP, 0,
                )  # fmt: skip
            for row in range(size):
                for at in range(0, 4 * GROUP, 4 * LANES):
                    x = load(room + 4 * GROUP * row + at)
                    x = divide(x, add(one, exponential(times(x, fill(_MINUS)))))
                    store(room + 4 * GROUP * row + at, times(x, load(other + 4 * GROUP * row + at)))
                place = 4 * (first * num_out + group * size + row)
                quantize_group(
                    room + 4 * GROUP * row,
                    load_int(table + 8 * GATED) + GROUP * first * num_out + GROUP * group * size + 4 * row,
                    4 * size,
                    load_int(table + 8 * GATED_SCALES) + place,
                    load_int(table + 8 * GATED_STARTS) + place,
                )
            first += size


@njit(_i64(_i64, _i64, _i64), nogil=True, cache=True)
def share(count, thread, num_threads):
    """Return where the part of a thread starts; that of the next thread is where it stops."""
    return count * thread // num_threads


@njit(types.void(_i64, _i64), nogil=True, cache=True)
def run(table, thread):
    """Do a thread's part of the pass that a table describes; all its threads must be under way at once."""
    num_rows, threads = load_int(table + 8 * ROWS), load_int(table + 8 * THREADS)
    width, padded_width = load_int(table + 8 * WIDTH), load_int(table + 8 * PADDED_WIDTH)
    heads, kv_heads = load_int(table + 8 * HEADS), load_int(table + 8 * KV_HEADS)
    padded = load_int(table + 8 * PADDED_HEAD)
    all_heads, attended_groups = heads + 2 * kv_heads, (heads * padded + GROUP - 1) // GROUP
    groups, mlp_groups, eps = padded_width // GROUP, load_int(table + 8 * MLP) // GROUP, load_float(table + 8 * EPS)
    hidden, projected, attended = (
        load_int(table + 8 * HIDDEN),
        load_int(table + 8 * PROJECTED),
        load_int(table + 8 * ATTENDED),
    )
    barrier = load_int(table + 8 * BARRIER)
    most_groups = max(groups, attended_groups)
    own = load_int(table + 8 * OWN) + thread * load_int(table + 8 * OWN_BYTES)  # this thread's room
    numbers, scales = own, own + GROUP * most_groups * num_rows
    starts = scales + 4 * most_groups * num_rows
    room = starts + 4 * most_groups * num_rows + 4 * GROUP * most_groups
    head_panels, width_panels = padded // PANEL, padded_width // PANEL
    turn = 1
    for layer in range(load_int(table + 8 * LAYERS)):
        of = load_int(table + 8 * LAYER_TABLE) + 8 * LAYER_SIZE * layer
        quantize_rows(hidden, 4 * padded_width, num_rows, width, load_int(of), groups, eps, numbers, scales, starts, 0)
        first, last = share(all_heads, thread, threads), share(all_heads, thread + 1, threads)
        project(
            of + 8 * QKV, num_rows, head_panels * first, head_panels * last, numbers, scales, starts, groups,
            projected, 4 * padded * all_heads, 0,
        )  # fmt: skip
        prepare_heads(table, layer, first, last)
        turn = wait(barrier, threads, turn)
        for unit in range(thread, num_rows * kv_heads, threads):
            attend(table, layer, unit // kv_heads, unit % kv_heads, room)
        turn = wait(barrier, threads, turn)
        quantize_rows(
            attended, 4 * GROUP * attended_groups, num_rows, 0, 0, attended_groups, eps, numbers, scales, starts, 0
        )
        first, last = share(width_panels, thread, threads), share(width_panels, thread + 1, threads)
        project(
            of + 8 * ATTENTION_OUT, num_rows, first, last, numbers, scales, starts, attended_groups, hidden,
            4 * padded_width, 1,
        )  # fmt: skip
        turn = wait(barrier, threads, turn)
        quantize_rows(
            hidden, 4 * padded_width, num_rows, width, load_int(of + 8 * MLP_NORM), groups, eps, numbers, scales, starts,
            0,
        )  # fmt: skip
        gate(
            table, layer, share(mlp_groups, thread, threads), share(mlp_groups, thread + 1, threads), numbers, scales,
            starts, room,
        )  # fmt: skip
        turn = wait(barrier, threads, turn)
        project(
            of + 8 * DOWN, num_rows, first, last, load_int(table + 8 * GATED), load_int(table + 8 * GATED_SCALES),
            load_int(table + 8 * GATED_STARTS), mlp_groups, hidden, 4 * padded_width, 1,
        )  # fmt: skip
        turn = wait(barrier, threads, turn)
        copy_to = load_int(of + 8 * COPY_TO)
        if copy_to and thread == 0:
            for at in range(0, 4 * padded_width * num_rows, 4 * LANES):
                store(copy_to + at, load(hidden + at))
    chosen, num_chosen = load_int(table + 8 * CHOSEN_ROWS), load_int(table + 8 * NUM_CHOSEN)
    quantize_rows(
        hidden, 4 * padded_width, num_chosen, width, load_int(table + 8 * NORM), groups, eps, numbers, scales, starts,
        chosen,
    )  # fmt: skip
    panels = load_int(table + 8 * VOCAB) // PANEL
    project(
        table + 8 * OUTPUT, num_chosen, share(panels, thread, threads), share(panels, thread + 1, threads), numbers,
        scales, starts, groups, load_int(table + 8 * LOGITS), 4 * PANEL * panels, 0,
    )  # fmt: skip
    wait(barrier, threads, turn)
