"""Blocks of attention: 16 positions, widened to floats once, times the queries and the weights of many rows.

Each score is a sum of its own, and so is each number of an output. Their order is that of the channels or of the
positions, whatever lies beside them, so how many of them the registers hold changes no bit.
"""

from __future__ import annotations

from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.tiles import PRODUCT
from card.kernels.jit.vectors import (
    FLOATS,
    INT,
    LANES,
    VOID,
    compiled,
    fetch,
    fill,
    fma_of,
    load,
    load_halves,
    loop,
    moved,
    operation,
    read,
    repeated,
    store,
    write,
)

BLOCK = LANES  # positions
BEHIND = 4 * LANES  # floats that may be read behind a block
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_IS_WIDE = PRODUCT.lanes == LANES  # 32 registers of 16 floats; otherwise 16 of 8, or 32 of 4
_SCORED = BLOCK if _IS_WIDE else 4  # positions whose sums fill the registers
MOST_QUERIES, _ACROSS = (4, 4) if _IS_WIDE else (2, 2)  # whose outputs are summed at once, and vectors of each
_FETCHED = MOST_QUERIES * _ACROSS // 4  # lines meanwhile: so 32 queries fetch all of a block of float16


def _folded(builder: Builder, rows: list[Value], width: int) -> Value:
    """Add lanes ``width`` apart in each of some vectors, then half so far apart, until all fit one vector.

    Sixteen vectors become that of their sums, all made in the same order: halves, quarters and so on.
    """
    while len(rows) > 1:
        count = len(rows) // 2
        # Each vector holds LANES // (2 * width) rows by now; two of them are folded into one that holds both.
        low = [lane for lane in range(LANES) if not lane & width]
        places = [(lane, lane + width) for lane in low]
        first = ir.Constant(ir.VectorType(_I32, LANES), _woven([a for a, _ in places], width))
        added = ir.Constant(ir.VectorType(_I32, LANES), _woven([b for _, b in places], width))
        rows = [
            builder.fadd(
                builder.shuffle_vector(rows[i], rows[i + count], first),
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


def _products(builder: Builder, places: list[Value], query: Value, num_vectors: Value) -> list[Value]:
    """Return the products of a query with some rows, whose lanes are yet to be added."""
    index, sums, end = loop(builder, num_vectors, [ir.Constant(FLOATS, [0.0] * LANES)] * len(places))
    at = builder.mul(index, ir.Constant(_I64, 4 * LANES))
    part = read(builder, builder.add(query, at), FLOATS)
    rows = [read(builder, builder.add(place, at), FLOATS) for place in places]
    new = [fma_of(builder, part, row, one) for row, one in zip(rows, sums, strict=True)]
    end(new)
    return new


@operation(FLOATS, INT, INT, INT)
def score_block(builder: Builder, rows: Value, query: Value, num_vectors: Value) -> Value:
    """Return the products of a query with BLOCK rows of so many vectors of floats, one row in each lane."""
    row_bytes = builder.mul(num_vectors, ir.Constant(_I64, 4 * LANES))
    places = [builder.add(rows, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(BLOCK)]
    count = BLOCK // _SCORED
    products = (_products(builder, places[first::count], query, num_vectors) for first in range(count))
    parts = [_folded(builder, sums, LANES // 2) for sums in products]
    return _folded(builder, parts, LANES // 2 // _SCORED)


def _write_sums(builder: Builder, num_queries: int, values: tuple[Value, ...]) -> None:
    """Write the loop that adds BLOCK rows times the weights of so many queries, whose sums fill the registers."""
    rows, num_vectors, weights, weight_bytes, out, out_bytes, ahead = values
    row_bytes = builder.mul(num_vectors, ir.Constant(_I64, 4 * LANES))
    rounds = builder.udiv(builder.add(num_vectors, ir.Constant(_I64, _ACROSS - 1)), ir.Constant(_I64, _ACROSS))
    index, _, end = loop(builder, rounds, [])
    at = builder.mul(index, ir.Constant(_I64, 4 * LANES * _ACROSS))
    row = builder.add(rows, at)
    first_line = builder.add(ahead, builder.mul(index, ir.Constant(_I64, 64 * _FETCHED)))
    for line in range(_FETCHED):
        fetch(builder, moved(builder, first_line, 64 * line))
    of_queries = [builder.mul(out_bytes, ir.Constant(_I64, query)) for query in range(num_queries)]
    places = [builder.add(builder.add(out, at), of_query) for of_query in of_queries]
    of_queries = [builder.mul(weight_bytes, ir.Constant(_I64, query)) for query in range(num_queries)]
    weights_of = [builder.add(weights, of_query) for of_query in of_queries]
    sums = [[read(builder, moved(builder, place, 4 * LANES * i), FLOATS) for i in range(_ACROSS)] for place in places]
    for position in range(BLOCK):
        parts = [read(builder, moved(builder, row, 4 * LANES * i), FLOATS) for i in range(_ACROSS)]
        for query in range(num_queries):
            weight = read(builder, moved(builder, weights_of[query], 4 * position), _F32)
            factor = repeated(builder, weight, FLOATS)
            sums[query] = [fma_of(builder, factor, part, one) for part, one in zip(parts, sums[query], strict=True)]
        row = builder.add(row, row_bytes)
    for place, of_query in zip(places, sums, strict=True):
        for i, one in enumerate(of_query):
            write(builder, one, moved(builder, place, 4 * LANES * i))
    end([])


@operation(VOID, *[INT] * 8)
def add_value_block(builder: Builder, num_queries: Value, *values: Value) -> None:
    """Add BLOCK rows of floats times weights to the sums of 1 to MOST_QUERIES queries, one row after the other.

    Args, all integers: num_queries; then
        rows, num_vectors: address of the rows, and how many vectors each has. A vector behind them is read, too.
        weights, weight_bytes: address of the first query's BLOCK weights, and bytes from query to query.
        out, out_bytes: address of the first query's sum, of `room_of` bytes, and bytes from query to query.
        ahead: address from which on the cache is fetched, 16 bytes for each vector and query.
    """
    done = builder.append_basic_block("added")
    switch = builder.switch(num_queries, done)
    for count in range(1, MOST_QUERIES + 1):
        branch = builder.append_basic_block(f"queries{count}")
        switch.add_case(ir.Constant(_I64, count), branch)
        builder.position_at_end(branch)
        _write_sums(builder, count, values)
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
def widen(source: int, number_bytes: int, out: int, num_vectors: int) -> None:
    """Write what the cache holds as floats; its numbers have 2 or 4 bytes."""
    if number_bytes == 4:
        for at in range(0, 4 * LANES * num_vectors, 4 * LANES):
            store(out + at, load(source + at))
        return
    for index in range(num_vectors):
        store(out + 4 * LANES * index, load_halves(source + 2 * LANES * index))
