"""Attention of single rows, 16 positions of their own text at a time and in order, wherever the cache holds them."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from card.kernels.jit import tables as t
from card.kernels.jit.rows import MINUS_ONE, ONE, ZERO, capped, exponential, rms_norm
from card.kernels.jit.tables import entry, layer_entry, real_entry, row_entry
from card.kernels.jit.vectors import (
    FLOATS,
    GROUP,
    LANES,
    Builder,
    Value,
    add,
    compiled,
    fill,
    floats,
    fma,
    fma_of,
    largest,
    load,
    load_float,
    load_halves,
    load_int,
    loop,
    maximum,
    moved,
    operation,
    read,
    repeated,
    store,
    store_float,
    store_halves,
    times,
    total,
    write,
)

BLOCK = LANES  # positions
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
MOST_HEADS = 4  # whose sums are made at once
_ACROSS = 4  # vectors of an output that are summed side by side
_BEHIND = 4 * LANES  # floats that may be read behind a block
_NOTHING = np.float32(-3.0e38)  # a score that gets no weight


def _sums(builder: Builder, rows: list[Value]) -> Value:
    """Return the sum of each of 16 vectors in its own lane, all in the same order: halves, quarters and so on."""
    width = LANES // 2
    while width:
        count = len(rows) // 2
        # Each vector holds LANES // (2 * width) rows by now; two of them are folded into one that holds both.
        low = [lane for lane in range(LANES) if not lane & width]
        places = [(lane, lane + width) for lane in low]
        kept = ir.Constant(ir.VectorType(_I32, LANES), _woven([a for a, _ in places], width))
        added = ir.Constant(ir.VectorType(_I32, LANES), _woven([b for _, b in places], width))
        rows = [
            builder.fadd(
                builder.shuffle_vector(rows[i], rows[i + count], kept),
                builder.shuffle_vector(rows[i], rows[i + count], added),
            )
            for i in range(count)
        ]
        width //= 2
    return rows[0]


def _woven(lanes: list[int], width: int) -> list[int]:
    """Return where the lanes of a fold come from: runs of ``width`` of the first vector, then of the second."""
    woven = []
    for first in range(0, len(lanes), width):
        run = lanes[first : first + width]
        woven += run + [lane + LANES for lane in run]
    return woven


@operation(floats, types.int64, types.int64, types.int64)
def score_block(builder: Builder, rows: Value, query: Value, num_vectors: Value) -> Value:
    """Return the products of a query with BLOCK rows of so many vectors of floats, one row in each lane."""
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    index, sums, end = loop(builder, num_vectors, [zero] * BLOCK)
    at = builder.mul(index, ir.Constant(_I64, 4 * LANES))
    part, row = read(builder, builder.add(query, at), FLOATS), builder.add(rows, at)
    row_bytes = builder.mul(num_vectors, ir.Constant(_I64, 4 * LANES))
    new = []
    for one in sums:
        new.append(fma_of(builder, part, read(builder, row, FLOATS), one))
        row = builder.add(row, row_bytes)
    end(new)
    return _sums(builder, new)


def _write_sums(builder: Builder, num_heads: int, values: tuple[Value, ...]) -> None:
    """Write the loop that adds BLOCK rows times the weights of so many heads, whose sums fill the registers."""
    rows, num_vectors, weights, weight_bytes, out, out_bytes = values
    row_bytes = builder.mul(num_vectors, ir.Constant(_I64, 4 * LANES))
    rounds = builder.udiv(builder.add(num_vectors, ir.Constant(_I64, _ACROSS - 1)), ir.Constant(_I64, _ACROSS))
    index, _, end = loop(builder, rounds, [])
    at = builder.mul(index, ir.Constant(_I64, 4 * LANES * _ACROSS))
    row = builder.add(rows, at)
    of_heads = [builder.mul(out_bytes, ir.Constant(_I64, head)) for head in range(num_heads)]
    places = [builder.add(builder.add(out, at), of_head) for of_head in of_heads]
    of_heads = [builder.mul(weight_bytes, ir.Constant(_I64, head)) for head in range(num_heads)]
    weights_of = [builder.add(weights, of_head) for of_head in of_heads]
    sums = [[read(builder, moved(builder, place, 4 * LANES * i), FLOATS) for i in range(_ACROSS)] for place in places]
    for position in range(BLOCK):
        parts = [read(builder, moved(builder, row, 4 * LANES * i), FLOATS) for i in range(_ACROSS)]
        for head in range(num_heads):
            weight = read(builder, moved(builder, weights_of[head], 4 * position), _F32)
            factor = repeated(builder, weight, FLOATS)
            sums[head] = [fma_of(builder, factor, part, one) for part, one in zip(parts, sums[head], strict=True)]
        row = builder.add(row, row_bytes)
    for place, of_head in zip(places, sums, strict=True):
        for i, one in enumerate(of_head):
            write(builder, one, moved(builder, place, 4 * LANES * i))
    end([])


@operation(types.void, *[types.int64] * 7)
def add_value_block(builder: Builder, num_heads: Value, *values: Value) -> None:
    """Add BLOCK rows of floats times weights to the sums of 1 to MOST_HEADS heads, one row after the other.

    Args, all integers: num_heads; then
        rows, num_vectors: address of the rows, and how many vectors each has. A vector behind them is read, too.
        weights, weight_bytes: address of the first head's BLOCK weights, and bytes from head to head.
        out, out_bytes: address of the first head's sum, of `room_of` bytes, and bytes from head to head.
    """
    done = builder.append_basic_block("added")
    switch = builder.switch(num_heads, done)
    for heads in range(1, MOST_HEADS + 1):
        branch = builder.append_basic_block(f"heads{heads}")
        switch.add_case(ir.Constant(_I64, heads), branch)
        builder.position_at_end(branch)
        _write_sums(builder, heads, values)
        builder.branch(done)
    builder.position_at_end(done)


@compiled
def room_of(num_vectors: int) -> int:
    """Return the bytes of a sum as `add_value_block` makes it."""
    return 4 * LANES * _ACROSS * ((num_vectors + _ACROSS - 1) // _ACROSS)


@compiled
def clear(at: int, num_bytes: int) -> None:
    """Fill whole vectors with zeros."""
    for place in range(at, at + num_bytes, 4 * LANES):
        store(place, fill(0.0))


@compiled
def widen(halves: int, out: int, num_vectors: int) -> None:
    """Turn what the cache holds into floats."""
    for index in range(num_vectors):
        store(out + 4 * LANES * index, load_halves(halves + 2 * LANES * index))


@compiled
def turn(x: int, cos: int, sin: int, size: int) -> None:
    """Turn a head by its position, in place."""
    half = 4 * (size // 2)
    whole = half // (4 * LANES) * (4 * LANES)
    for at in range(0, whole, 4 * LANES):
        low, high = load(x + at), load(x + half + at)
        store(x + at, fma(low, load(cos + at), times(times(high, load(sin + at)), fill(MINUS_ONE))))
        store(x + half + at, fma(high, load(cos + half + at), times(low, load(sin + half + at))))
    for at in range(whole, half, 4):
        a, b = load_float(x + at), load_float(x + half + at)
        store_float(x + at, a * load_float(cos + at) - b * load_float(sin + at))
        store_float(x + half + at, b * load_float(cos + half + at) + a * load_float(sin + half + at))


@compiled
def norm_all_heads(table: int, layer: int, row: int) -> None:
    """Apply the norms of a row's queries and keys, each over all heads at once."""
    of, heads, kv_heads = layer_entry(table, layer), entry(table, t.HEADS), entry(table, t.KV_HEADS)
    size, padded, eps = entry(table, t.HEAD), entry(table, t.PADDED_HEAD), real_entry(table, t.EPS)
    query = entry(table, t.PROJECTED) + 4 * padded * (heads + 2 * kv_heads) * row
    key = query + 4 * padded * heads
    rms_norm(query, entry(of, t.QUERY_NORM), query, size * heads, padded * heads, eps)
    rms_norm(key, entry(of, t.KEY_NORM), key, size * kv_heads, padded * kv_heads, eps)


@compiled
def prepare_heads(table: int, layer: int, first: int, last: int) -> None:
    """Norm and turn heads ``first`` to ``last`` (queries, keys, values) of all rows; keep keys and values."""
    of = layer_entry(table, layer)
    heads, kv_heads = entry(table, t.HEADS), entry(table, t.KV_HEADS)
    size, padded, eps = entry(table, t.HEAD), entry(table, t.PADDED_HEAD), real_entry(table, t.EPS)
    has_head_norms, turned = not entry(table, t.HAS_WIDE_NORMS), entry(of, t.TURNED)
    for row in range(entry(table, t.ROWS)):
        its = row_entry(table, row)
        angle = 4 * turned * entry(its, t.POSITION)
        kept = entry(its, t.KV) + layer * entry(its, t.LAYER_BYTES) + entry(its, t.SLOT) * entry(its, t.KV_ROW)
        for head in range(first, last):
            x = entry(table, t.PROJECTED) + 4 * padded * (row * (heads + 2 * kv_heads) + head)
            if head < heads + kv_heads:
                norm = entry(of, t.QUERY_NORM if head < heads else t.KEY_NORM)
                if norm and has_head_norms:
                    rms_norm(x, norm, x, size, padded, eps)
                if turned:
                    turn(x, entry(of, t.COS) + angle, entry(of, t.SIN) + angle, turned)
            if head >= heads:
                out = kept + (head - heads) * entry(its, t.HEAD_BYTES)
                for at in range(0, padded, LANES):
                    store_halves(out + 2 * at, load(x + 4 * at))


@compiled
def weigh(scores: int, seen: int) -> None:
    """Turn scores into weights whose sum is 1, in place, with weights of 0 up to a whole vector."""
    end = 4 * seen
    width = (end + 4 * LANES - 1) // (4 * LANES) * (4 * LANES)
    for at in range(end, width, 4):
        store_float(scores + at, _NOTHING)
    most = load(scores)
    for at in range(4 * LANES, width, 4 * LANES):
        most = maximum(most, load(scores + at))
    top = fill(-largest(most))
    for at in range(0, width, 4 * LANES):
        store(scores + at, exponential(add(load(scores + at), top)))
    for at in range(end, width, 4):
        store_float(scores + at, ZERO)
    sums = fill(ZERO)
    for at in range(0, width, 4 * LANES):
        sums = add(sums, load(scores + at))
    share = fill(ONE / total(sums))
    for at in range(0, width, 4 * LANES):
        store(scores + at, times(load(scores + at), share))


@compiled
def widen_block(table: int, row: int, first: int, position: int, stop: int, out: int) -> None:
    """Write BLOCK rows of the cache as floats, those of a text from ``position`` on, and zeros from ``stop`` on.

    Args:
        row: of the pass, whose text it is.
        first: address of the keys or values of the text's row 0.
    """
    its, num_vectors = row_entry(table, row), entry(table, t.PADDED_HEAD) // LANES
    row_bytes, prefix = entry(its, t.KV_ROW), entry(its, t.PREFIX)
    ancestors = entry(table, t.ANCESTORS) + 8 * entry(its, t.FIRST_ANCESTOR)
    if position + BLOCK <= min(prefix, stop):  # most blocks: their rows lie one behind the other
        widen(first + position * row_bytes, out, BLOCK * num_vectors)
        return
    for at in range(position, position + BLOCK):
        place = out + 4 * LANES * num_vectors * (at - position)
        if at < stop:
            kept = at if at < prefix else load_int(ancestors + 8 * (at - prefix))
            widen(first + kept * row_bytes, place, num_vectors)
        else:
            clear(place, 4 * LANES * num_vectors)


@compiled
def attend(table: int, layer: int, row: int, kv_head: int, room: int) -> None:
    """Write the attention of a row's query heads that share a t.KV head.

    ``room`` has place for BLOCK rows as floats, a vector behind them, and for each head a sum and the scores.
    """
    heads, kv_heads, padded = entry(table, t.HEADS), entry(table, t.KV_HEADS), entry(table, t.PADDED_HEAD)
    group, its, num_vectors = heads // kv_heads, row_entry(table, row), padded // LANES
    stop, window = entry(its, t.POSITION) + 1, entry(layer_entry(table, layer), t.WINDOW)
    start = max(0, stop - window) if window else 0
    width = 4 * ((stop - start + LANES - 1) // LANES * LANES)
    keys = entry(its, t.KV) + layer * entry(its, t.LAYER_BYTES) + kv_head * entry(its, t.HEAD_BYTES)
    values = keys + kv_heads * entry(its, t.HEAD_BYTES)
    query = entry(table, t.PROJECTED) + 4 * padded * (row * (heads + 2 * kv_heads) + kv_head * group)
    sums, sum_bytes = room + 4 * (BLOCK * padded + _BEHIND), room_of(num_vectors)
    scores, scale = sums + group * sum_bytes, fill(real_entry(table, t.SCALE))
    is_capped, cap = entry(table, t.SCORE_CAP) != 0, fill(real_entry(table, t.SCORE_CAP))
    for position in range(start, stop, BLOCK):
        widen_block(table, row, keys, position, stop, room)
        for one in range(group):
            block = times(score_block(room, query + 4 * padded * one, num_vectors), scale)
            if is_capped:
                block = capped(block, cap)
            store(scores + width * one + 4 * (position - start), block)
    for one in range(group):
        weigh(scores + width * one, stop - start)
    clear(sums, group * sum_bytes)
    for position in range(start, stop, BLOCK):
        widen_block(table, row, values, position, stop, room)
        for one in range(0, group, MOST_HEADS):
            weights = scores + width * one + 4 * (position - start)
            add_value_block(
                min(MOST_HEADS, group - one), room, num_vectors, weights, width, sums + one * sum_bytes, sum_bytes
            )
    out = entry(table, t.ATTENDED) + row * (4 * ((heads * padded + GROUP - 1) // GROUP * GROUP))
    for one in range(group):
        for at in range(0, 4 * padded, 4 * LANES):
            store(out + 4 * padded * (kv_head * group + one) + at, load(sums + one * sum_bytes + at))
