"""The gated delta rule of one head: a state of key times value channels, and what a row does to it.

The lanes are value channels, and the key channels come one after the other. So each number of a state or of an output
is a sum of its own, in the order of the key channels, whatever registers hold it. A row decays the state, reads it with
its key, writes what its value differs by, and reads it with its query (https://arxiv.org/abs/2412.06464). What it wrote
can be repeated from a record of it with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.rows import exponential, sigmoid, softplus
from card.kernels.jit.tiles import PRODUCT
from card.kernels.jit.vectors import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    VOID,
    add,
    compiled,
    fma_of,
    load,
    loop,
    moved,
    operation,
    read,
    repeated,
    splat,
    store,
    times,
    write,
)

_ACROSS = 4 if PRODUCT.lanes == LANES else 2  # vectors of a state that are worked on at once
_BESIDE = 4 * LANES * _ACROSS  # bytes of them
_I64, _F32 = ir.IntType(64), ir.FloatType()


def _parts_at(builder: Builder, place: Value, count: int) -> list[Value]:
    """Return so many vectors that lie beside each other."""
    return [read(builder, moved(builder, place, 4 * LANES * i), FLOATS) for i in range(count)]


def _put(builder: Builder, parts: list[Value], place: Value) -> None:
    """Store vectors beside each other."""
    for i, one in enumerate(parts):
        write(builder, one, moved(builder, place, 4 * LANES * i))


def _channel(builder: Builder, place: Value, index: Value) -> Value:
    """Return one of some floats, in all lanes."""
    at = builder.add(place, builder.shl(index, ir.Constant(_I64, 2)))
    return repeated(builder, read(builder, at, _F32), FLOATS)


def _decayed(builder: Builder, row: Value, decay: Value, count: int) -> list[Value]:
    return [builder.fmul(part, decay) for part in _parts_at(builder, row, count)]


def _read_decayed(
    builder: Builder, state: Value, row_bytes: Value, size: Value, key: Value, decay: Value, count: int
) -> list[Value]:
    """Write the loop that reads some columns of a state with a key, as if they had decayed."""
    index, sums, end = loop(builder, size, [splat(FLOATS, 0.0)] * count)
    parts = _decayed(builder, builder.add(state, builder.mul(index, row_bytes)), decay, count)
    factor = _channel(builder, key, index)
    new = [fma_of(builder, factor, *both) for both in zip(parts, sums, strict=True)]
    end(new)
    return new


def _write_changed(
    builder: Builder, source: Value, state: Value, row_bytes: Value, size: Value, key: Value, deltas: list[Value],
    decay: Value, query: Value | None,
) -> list[Value]:  # fmt: skip
    """Write the loop that decays and changes some columns of a state; return what a query reads there."""
    count = len(deltas)
    index, sums, end = loop(builder, size, [splat(FLOATS, 0.0)] * (count if query is not None else 0))
    before = builder.mul(index, row_bytes)
    parts = _decayed(builder, builder.add(source, before), decay, count)
    factor = _channel(builder, key, index)
    parts = [fma_of(builder, factor, *both) for both in zip(deltas, parts, strict=True)]
    _put(builder, parts, builder.add(state, before))
    if query is not None:
        factor = _channel(builder, query, index)
        sums = [fma_of(builder, factor, *both) for both in zip(parts, sums, strict=True)]
    end(sums)
    return sums


def _advance(count: int) -> Callable[..., Any]:
    """Return the operation that `advance` does to so many vectors of columns."""

    def instructions(
        builder: Builder, source: Value, state: Value, row_bytes: Value, size: Value, query: Value, key: Value,
        value: Value, beta: Value, decay: Value, delta: Value, out: Value,
    ) -> None:  # fmt: skip
        beta, decay = (repeated(builder, one, FLOATS) for one in (beta, decay))
        known = _read_decayed(builder, source, row_bytes, size, key, decay, count)
        wanted = _parts_at(builder, value, count)
        deltas = [builder.fmul(beta, builder.fsub(*both)) for both in zip(wanted, known, strict=True)]
        _put(builder, deltas, delta)
        _put(builder, _write_changed(builder, source, state, row_bytes, size, key, deltas, decay, query), out)

    return instructions


def _repeat(count: int) -> Callable[..., Any]:
    """Return the operation that `repeat` does to so many vectors of columns."""

    def instructions(
        builder: Builder, source: Value, state: Value, row_bytes: Value, size: Value, key: Value, decay: Value,
        delta: Value,
    ) -> None:  # fmt: skip
        deltas, decay = _parts_at(builder, delta, count), repeated(builder, decay, FLOATS)
        _write_changed(builder, source, state, row_bytes, size, key, deltas, decay, None)

    return instructions


_ADVANCED = (VOID, *[INT] * 7, FLOAT, FLOAT, INT, INT)
_REPEATED = (VOID, *[INT] * 5, FLOAT, INT)
advance_beside, advance_one = (operation(*_ADVANCED)(_advance(count)) for count in (_ACROSS, 1))
repeat_beside, repeat_one = (operation(*_REPEATED)(_repeat(count)) for count in (_ACROSS, 1))


@compiled
def advance(
    source: int, state: int, key_size: int, value_size: int, query: int, key: int, value: int, beta: float,
    decay: float, delta: int, out: int,
) -> None:  # fmt: skip
    """Compute a row: the state S behind it, and its output.

    S = decay * source; delta = beta * (value - S^T key); S = S + key delta^T; out = S^T query.

    Args:
        source, state: addresses of the states before and behind the row, [key_size, value_size] float32; they may be
            one. The value size is a multiple of LANES.
        query, key: addresses of [key_size] float32, as they are multiplied: normed, and the query scaled.
        value: address of [value_size] float32.
        delta, out: addresses of [value_size] float32; key, decay and delta are the record that `repeat` takes.
    """
    row_bytes = 4 * value_size
    whole = row_bytes // _BESIDE * _BESIDE
    for at in range(0, whole, _BESIDE):
        advance_beside(
            source + at, state + at, row_bytes, key_size, query, key, value + at, beta, decay, delta + at, out + at
        )
    for at in range(whole, row_bytes, 4 * LANES):
        advance_one(
            source + at, state + at, row_bytes, key_size, query, key, value + at, beta, decay, delta + at, out + at
        )


@compiled
def repeat(source: int, state: int, key_size: int, value_size: int, key: int, decay: float, delta: int) -> None:
    """Make a state what it is behind a row, of its record; arguments as of `advance`."""
    row_bytes = 4 * value_size
    whole = row_bytes // _BESIDE * _BESIDE
    for at in range(0, whole, _BESIDE):
        repeat_beside(source + at, state + at, row_bytes, key_size, key, decay, delta + at)
    for at in range(whole, row_bytes, 4 * LANES):
        repeat_one(source + at, state + at, row_bytes, key_size, key, decay, delta + at)


@compiled
def gates(a: int, b: int, rate: int, bias: int, num_heads: int, decay: int, beta: int) -> None:
    """Compute decay = e^(rate * softplus(a + bias)) and beta = 1 / (1 + e^-b) of heads, a multiple of LANES.

    All arguments but their number are addresses of [num_heads] float32; rates are below 0.
    """
    for at in range(0, 4 * num_heads, 4 * LANES):
        step = times(load(rate + at), softplus(add(load(a + at), load(bias + at))))
        store(decay + at, exponential(step))
        store(beta + at, sigmoid(load(b + at)))
