"""Weights as the bytes that `card.models.jit.tiles` reads, made once while a model is loaded."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from card.models.jit.compiled import compiled
from card.models.jit.rows import MINUS_ONE, ONE, ZERO
from card.models.jit.tiles import PANEL
from card.models.jit.vectors import (
    FLOATS,
    INTS,
    LANES,
    Builder,
    Floats,
    Value,
    fill,
    floats,
    largest,
    load,
    maximum,
    operation,
    read,
    rounded,
    store_float,
    times,
    write,
)

_LARGEST = np.float32(127.0)
_LEAST_SCALE = np.float32(1e-30)  # of a channel of zeros, whose integers are zeros, too
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_ZERO = 128  # weights are unsigned bytes around this
_FOUR = 4 * PANEL  # bytes from four weights of a channel to the next four


@operation(floats, types.int64)
def load_bfloat16(builder: Builder, address: Value) -> Value:
    """Return 16 numbers stored as bfloat16."""
    upper = builder.zext(read(builder, address, ir.VectorType(_I16, LANES)), INTS)
    return builder.bitcast(builder.shl(upper, ir.Constant(INTS, [16] * LANES)), FLOATS)


@operation(types.void, types.int64, floats)
def store_weights(builder: Builder, place: Value, x: Value) -> None:
    """Store 16 whole numbers as bytes around 128, four of them at a time."""
    whole = builder.add(builder.fptosi(x, INTS), ir.Constant(INTS, [_ZERO] * LANES))
    packed = builder.bitcast(builder.trunc(whole, ir.VectorType(_I8, LANES)), ir.VectorType(_I32, LANES // 4))
    for four in range(LANES // 4):
        at = builder.add(place, ir.Constant(ir.IntType(64), _FOUR * four))
        write(builder, builder.extract_element(packed, ir.Constant(_I32, four)), at)


@compiled
def load_weights(source: int, index: int, is_bfloat16: int) -> Floats:
    """Return 16 weights of a row, the first of them number ``index``."""
    if is_bfloat16:
        return load_bfloat16(source + 2 * index)
    return load(source + 4 * index)


@compiled
def pack(
    source: int, is_bfloat16: int, num_out: int, num_in: int, panels: int, panel_bytes: int, scales: int
) -> None:  # fmt: skip
    """Write the bytes and the scales of a weight; padding must be there already.

    Args:
        source: address of [num_out, num_in] bfloat16 or float32; num_in is a multiple of LANES.
        panels: address of the panels, ``panel_bytes`` for each.
        scales: address of a float32 for each channel.
    """
    for row in range(num_out):
        its = source + row * num_in * (2 if is_bfloat16 else 4)
        most = fill(ZERO)
        for index in range(0, num_in, LANES):
            part = load_weights(its, index, is_bfloat16)
            most = maximum(most, maximum(part, times(part, fill(MINUS_ONE))))
        scale = max(largest(most) / _LARGEST, _LEAST_SCALE)
        store_float(scales + 4 * row, scale)
        factor = fill(ONE / scale)
        place = panels + row // PANEL * panel_bytes + 4 * (row % PANEL)
        for index in range(0, num_in, LANES):
            whole = rounded(times(load_weights(its, index, is_bfloat16), factor))
            store_weights(place + _FOUR * (index // 4), whole)
