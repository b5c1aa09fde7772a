"""Sixteen positions of a text at a time: their scores for a query, and their values times its weights."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from card.models.jit.compiled import compiled
from card.models.jit.vectors import (
    FLOATS,
    LANES,
    Builder,
    Value,
    fill,
    floats,
    fma_of,
    load_halves,
    moved,
    operation,
    read,
    repeated,
    store,
    write,
)

BLOCK = LANES  # positions
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
MOST_HEADS = 4  # whose sums are made at once
_ACROSS = 4  # vectors of an output that are summed side by side


def _loop(builder: Builder, count: Value, first: list[Value]) -> tuple[Value, list[Any], Any]:
    """Begin a loop with values that it carries; return its index, them, and what ends it with their new ones."""
    before = builder.block
    body, after = (builder.append_basic_block(name) for name in ("body", "after"))
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), before)
    carried = [builder.phi(value.type) for value in first]
    for phi, value in zip(carried, first, strict=True):
        phi.add_incoming(value, before)

    def end(new: list[Value]) -> None:
        following = builder.add(index, ir.Constant(_I64, 1))
        index.add_incoming(following, body)
        for phi, value in zip(carried, new, strict=True):
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)

    return index, carried, end


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
    index, sums, end = _loop(builder, num_vectors, [zero] * BLOCK)
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
    index, _, end = _loop(builder, rounds, [])
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
