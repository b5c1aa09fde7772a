"""Scores of attention, of many queries with a block of keys, and the weights that they become.

Sixteen queries lie beside each other in the lanes of a register, and a score is made in the order that
`attention_blocks.score_block` has for one query. Its lanes are channels, added up by shuffles in the end; here each of
these sums has a register of its own, and adding them takes one instruction for 16 scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir

from card.kernels.jit.addresses import all_heads
from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.rows import ONE, ZERO, capped, exponential
from card.kernels.jit.tables import LayerTable, PassTable
from card.kernels.jit.tiles import PRODUCT
from card.kernels.jit.vectors import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    VOID,
    add,
    compiled,
    fetch,
    fill,
    fma_of,
    largest,
    load,
    load_float,
    loop,
    maximum,
    moved,
    operation,
    read,
    repeated,
    splat,
    store,
    store_float,
    times,
    total,
    write,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR = 4 * LANES  # bytes
_NOTHING = np.float32(-3.0e38)  # a score that gets no weight
_LEAST_LANES = 15  # queries from which a vector of them costs less than scoring them one by one
# (vectors of queries, positions) whose sums fill the registers: 32 of 16 floats, 16 of 8 or 32 of 4.
_TILES = {1: 16, 2: 8, 3: 4} if PRODUCT.lanes == LANES else {1: 4}
MOST_VECTORS = max(_TILES)


class Queries(NamedTuple):
    """Heads ``head`` to ``last_head`` of queries of rows ``first`` to ``last`` of one text."""

    first: int
    last: int
    head: int
    last_head: int


def _times(builder: Builder, value: Value, factor: int) -> Value:
    return builder.mul(value, ir.Constant(_I64, factor))


def _transposed(builder: Builder, rows: list[Value]) -> list[Value]:
    """Return the columns of 16 vectors."""
    lanes = range(LANES)
    for width in (1, 2, 4, 8):
        low = [lane if not lane & width else lane - width + LANES for lane in lanes]
        high = [lane + width if not lane & width else lane + LANES for lane in lanes]
        places = [ir.Constant(ir.VectorType(_I32, LANES), some) for some in (low, high)]
        pairs = [(rows[i & ~width], rows[i | width], places[bool(i & width)]) for i in lanes]
        rows = [builder.shuffle_vector(*pair) for pair in pairs]
    return rows


@operation(VOID, INT, INT, INT)
def transpose(builder: Builder, source: Value, source_bytes: Value, out: Value) -> None:
    """Write the columns of 16 vectors that lie ``source_bytes`` apart, one behind the other."""
    rows = [read(builder, builder.add(source, _times(builder, source_bytes, i)), FLOATS) for i in range(LANES)]
    for i, column in enumerate(_transposed(builder, rows)):
        write(builder, column, moved(builder, out, _VECTOR * i))


def _sums_of_lane(
    builder: Builder, keys: list[Value], queries: list[Value], num_vectors: Value, ahead: Value | None
) -> list[Value]:
    """Return the products of one channel of each vector of them, added up, for each key and vector of queries.

    Args:
        keys, queries: addresses of the channel in the first vector.
        ahead: address of what is fetched meanwhile; None: nothing.
    """
    index, sums, end = loop(builder, num_vectors, [splat(FLOATS, 0.0)] * (len(keys) * len(queries)))
    at = _times(builder, index, _VECTOR)
    of_queries = _times(builder, index, _VECTOR * LANES)
    if ahead is not None:
        fetch(builder, builder.add(ahead, _times(builder, index, 8 * len(keys))))
    parts, new = [read(builder, builder.add(query, of_queries), FLOATS) for query in queries], [*sums]
    for i, key in enumerate(keys):
        number = repeated(builder, read(builder, builder.add(key, at), FLOAT), FLOATS)
        for j, part in enumerate(parts, i * len(parts)):
            new[j] = fma_of(builder, number, part, new[j])
    end(new)
    return new


def _added(builder: Builder, x: list[Value], y: list[Value]) -> list[Value]:
    return [builder.fadd(*both) for both in zip(x, y, strict=True)]


def _write_tile(builder: Builder, num_queries: int, values: tuple[Value, ...]) -> None:
    """Write what scores so many vectors of queries: a few positions at a time, and of these four lanes at a time."""
    keys, queries, num_vectors, scale, out, out_bytes, ahead = values
    num_keys = _TILES[num_queries]
    size = num_keys * num_queries
    with builder.goto_entry_block():  # aligned, so that LLVM aligns what the registers do not hold, too
        room = builder.alloca(ir.ArrayType(FLOATS, 4 * size + LANES * num_queries))
        room.align = _VECTOR
    of_lanes = builder.ptrtoint(room, _I64)
    scores = moved(builder, of_lanes, 4 * _VECTOR * size)
    row_bytes = _times(builder, num_vectors, _VECTOR)
    group, _, end_groups = loop(builder, ir.Constant(_I64, LANES // num_keys), [])
    lane, _, end_lanes = loop(builder, ir.Constant(_I64, LANES // 4), [])
    first_key = builder.add(
        keys, builder.add(_times(builder, builder.mul(group, row_bytes), num_keys), _times(builder, lane, 4))
    )
    first_query = builder.add(queries, _times(builder, lane, _VECTOR))
    fetched = _times(builder, builder.add(_times(builder, group, 4), lane), 8 * num_keys)
    fetched = builder.add(ahead, builder.mul(fetched, num_vectors))
    parts = [
        _sums_of_lane(
            builder,
            [builder.add(first_key, moved(builder, _times(builder, row_bytes, i), 4 * more)) for i in range(num_keys)],
            [
                builder.add(first_query, moved(builder, _times(builder, row_bytes, LANES * i), _VECTOR * more))
                for i in range(num_queries)
            ],
            num_vectors,
            None if more else fetched,
        )
        for more in (0, 8, 4, 12)
    ]
    at = builder.add(of_lanes, _times(builder, lane, _VECTOR * size))
    for i, one in enumerate(_added(builder, _added(builder, *parts[:2]), _added(builder, *parts[2:]))):
        write(builder, one, moved(builder, at, _VECTOR * i))
    end_lanes([])
    at = builder.add(scores, _times(builder, group, _VECTOR * num_keys))
    for i in range(size):
        four = [read(builder, moved(builder, of_lanes, _VECTOR * (size * more + i)), FLOATS) for more in range(4)]
        score = builder.fadd(builder.fadd(four[0], four[2]), builder.fadd(four[1], four[3]))
        key, query = divmod(i, num_queries)
        place = moved(builder, at, _VECTOR * (LANES * query + key))
        write(builder, builder.fmul(score, repeated(builder, scale, FLOATS)), place)
    end_groups([])
    for first in range(0, LANES * num_queries, LANES):
        of_keys = [read(builder, moved(builder, scores, _VECTOR * (first + i)), FLOATS) for i in range(LANES)]
        for i, one in enumerate(_transposed(builder, of_keys), first):
            write(builder, one, builder.add(out, _times(builder, out_bytes, i)))


@operation(VOID, INT, INT, INT, INT, FLOAT, INT, INT, INT)
def score_tile(builder: Builder, num_queries: Value, *values: Value) -> None:
    """Write the scores of 1 to MOST_VECTORS vectors of 16 queries with 16 rows of floats.

    Args: num_queries; then
        keys, queries, num_vectors: addresses of the rows and of the queries, channel by channel, and vectors of a row.
        scale: what scores are times.
        out, out_bytes: address of the first query's scores, and bytes from query to query.
        ahead: address of what the next tile reads, as 16 bits.
    """
    done = builder.append_basic_block("scored")
    switch = builder.switch(num_queries, done)
    for count in _TILES:
        branch = builder.append_basic_block(f"vectors{count}")
        switch.add_case(ir.Constant(_I64, count), branch)
        builder.position_at_end(branch)
        _write_tile(builder, count, values)
        builder.branch(done)
    builder.position_at_end(done)


@compiled
def vectors_of(num_queries: int) -> int:
    """Return how many vectors of queries are scored as such; the queries behind them are too few for another one."""
    return (num_queries + LANES - _LEAST_LANES) // LANES


@compiled
def transpose_queries(table: PassTable, layer: LayerTable, queries: Queries, room: int, out: int) -> None:
    """Write vectors of queries channel by channel, zeros behind the last query; ``room`` is for 16 of them."""
    padded, num_heads = layer.padded_head, queries.last_head - queries.head
    num_queries = (queries.last - queries.first) * num_heads
    for vector in range(vectors_of(num_queries)):
        for lane in range(LANES):
            query, place = LANES * vector + lane, room + 4 * padded * lane
            row, head = queries.first + query // num_heads, queries.head + query % num_heads
            source = table.projected + 4 * padded * (row * all_heads(layer) + head)
            for at in range(0, 4 * padded, 4 * LANES):
                store(place + at, load(source + at) if query < num_queries else fill(ZERO))
        for at in range(0, 4 * padded, 4 * LANES):
            transpose(room + at, 4 * padded, out + LANES * (4 * padded * vector + at))


@compiled
def score_vectors(
    table: PassTable, layer: LayerTable, num_queries: int, queries: int, block: int, scores: int, width: int, ahead: int
) -> None:
    """Score a block of keys for the vectors of so many queries.

    Args:
        queries: address of what `transpose_queries` wrote.
        scores, width: address of the first query's scores of this block, and bytes from query to query.
        ahead: address of the next block in the cache.
    """
    num_vectors, cap = vectors_of(num_queries), fill(table.score_cap)
    for vector in range(0, num_vectors, MOST_VECTORS):
        score_tile(
            min(MOST_VECTORS, num_vectors - vector), block, queries + 4 * LANES * layer.padded_head * vector,
            layer.padded_head // LANES, layer.scale, scores + LANES * width * vector, width, ahead,
        )  # fmt: skip
    if table[PassTable.score_cap]:
        for at in range(scores, scores + LANES * num_vectors * width, width):
            store(at, capped(load(at), cap))


@compiled
def weigh(scores: int, seen: int, sink: int) -> None:
    """Turn scores into weights whose sum is 1, in place, with weights of 0 up to a whole vector.

    ``sink`` is the address of one more score, whose weight is left out and comes last in the sum; 0: there is none.
    """
    end = 4 * seen
    last = (end - 1) // (4 * LANES) * (4 * LANES)  # where the last vector begins
    for at in range(end, last + 4 * LANES, 4):
        store_float(scores + at, _NOTHING)
    most = other = load(scores + last)
    for at in range(0, last, 8 * LANES):  # two chains: a largest number has no order
        most, other = maximum(most, load(scores + at)), maximum(other, load(scores + at + 4 * LANES))
    most = maximum(most, other)
    if sink:
        most = maximum(most, fill(load_float(sink)))
    top, sums = fill(-largest(most)), fill(ZERO)
    for at in range(0, last, 4 * LANES):
        x = exponential(add(load(scores + at), top))
        store(scores + at, x)
        sums = add(sums, x)
    store(scores + last, exponential(add(load(scores + last), top)))
    for at in range(end, last + 4 * LANES, 4):
        store_float(scores + at, ZERO)
    sums = add(sums, load(scores + last))
    whole = total(sums)
    if sink:
        whole = whole + largest(exponential(add(fill(load_float(sink)), top)))
    share = fill(ONE / whole)
    for at in range(0, last + 4 * LANES, 4 * LANES):
        store(scores + at, times(load(scores + at), share))
