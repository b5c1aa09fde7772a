"""Attention of single rows, through the positions of their own text in order, wherever the cache holds them."""

from __future__ import annotations

import numpy as np

from card.models.jit.blocks import BLOCK, MOST_HEADS, add_value_block, clear, room_of, score_block, widen
from card.models.jit.compiled import compiled
from card.models.jit.rows import MINUS_ONE, ONE, ZERO, exponential, rms_norm
from card.models.jit.tables import (
    ANCESTORS,
    ATTENDED,
    COS,
    EPS,
    FIRST_ANCESTOR,
    HEAD,
    HEAD_BYTES,
    HEADS,
    KEY_NORM,
    KV,
    KV_HEADS,
    KV_ROW,
    LAYER_BYTES,
    PADDED_HEAD,
    POSITION,
    PREFIX,
    PROJECTED,
    QUERY_NORM,
    ROWS,
    SCALE,
    SIN,
    SLOT,
    WINDOW,
    entry,
    layer_entry,
    real_entry,
    row_entry,
)
from card.models.jit.vectors import (
    GROUP,
    LANES,
    add,
    fill,
    fma,
    largest,
    load,
    load_float,
    load_int,
    maximum,
    store,
    store_float,
    store_halves,
    times,
    total,
)

_BEHIND = 4 * LANES  # floats that may be read behind a block
_NOTHING = np.float32(-3.0e38)  # a score that gets no weight


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
def prepare_heads(table: int, layer: int, first: int, last: int) -> None:
    """Norm and turn heads ``first`` to ``last`` (queries, keys, values) of all rows; keep keys and values."""
    of = layer_entry(table, layer)
    heads, kv_heads = entry(table, HEADS), entry(table, KV_HEADS)
    size, padded, eps = entry(table, HEAD), entry(table, PADDED_HEAD), real_entry(table, EPS)
    for row in range(entry(table, ROWS)):
        its = row_entry(table, row)
        angle = 4 * size * entry(its, POSITION)
        kept = entry(its, KV) + layer * entry(its, LAYER_BYTES) + entry(its, SLOT) * entry(its, KV_ROW)
        for head in range(first, last):
            x = entry(table, PROJECTED) + 4 * padded * (row * (heads + 2 * kv_heads) + head)
            if head < heads + kv_heads:
                norm = entry(of, QUERY_NORM if head < heads else KEY_NORM)
                if norm:
                    rms_norm(x, norm, x, size, padded, eps)
                turn(x, entry(table, COS) + angle, entry(table, SIN) + angle, size)
            if head >= heads:
                out = kept + (head - heads) * entry(its, HEAD_BYTES)
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
    its, num_vectors = row_entry(table, row), entry(table, PADDED_HEAD) // LANES
    row_bytes, prefix = entry(its, KV_ROW), entry(its, PREFIX)
    ancestors = entry(table, ANCESTORS) + 8 * entry(its, FIRST_ANCESTOR)
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
    """Write the attention of a row's query heads that share a KV head.

    ``room`` has place for BLOCK rows as floats, a vector behind them, and for each head a sum and the scores.
    """
    heads, kv_heads, padded = entry(table, HEADS), entry(table, KV_HEADS), entry(table, PADDED_HEAD)
    group, its, num_vectors = heads // kv_heads, row_entry(table, row), padded // LANES
    stop, window = entry(its, POSITION) + 1, entry(layer_entry(table, layer), WINDOW)
    start = max(0, stop - window) if window else 0
    width = 4 * ((stop - start + LANES - 1) // LANES * LANES)
    keys = entry(its, KV) + layer * entry(its, LAYER_BYTES) + kv_head * entry(its, HEAD_BYTES)
    values = keys + kv_heads * entry(its, HEAD_BYTES)
    query = entry(table, PROJECTED) + 4 * padded * (row * (heads + 2 * kv_heads) + kv_head * group)
    sums, sum_bytes = room + 4 * (BLOCK * padded + _BEHIND), room_of(num_vectors)
    scores, scale = sums + group * sum_bytes, fill(real_entry(table, SCALE))
    for position in range(start, stop, BLOCK):
        widen_block(table, row, keys, position, stop, room)
        for one in range(group):
            block = times(score_block(room, query + 4 * padded * one, num_vectors), scale)
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
    out = entry(table, ATTENDED) + row * (4 * ((heads * padded + GROUP - 1) // GROUP * GROUP))
    for one in range(group):
        for at in range(0, 4 * padded, 4 * LANES):
            store(out + 4 * padded * (kv_head * group + one) + at, load(sums + one * sum_bytes + at))
