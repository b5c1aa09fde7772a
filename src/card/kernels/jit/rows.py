"""Operations on single rows and on vectors of them: norms, exponentials, and their bytes for a product.

Weights become bytes here too, once while a model is loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir

from card.kernels.jit.expanded_tiles import expand_panels
from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.tables import AS_BYTES, AS_FLOATS, LinearEntry
from card.kernels.jit.tiles import MOST_ROWS, PANEL, multiply
from card.kernels.jit.vectors import (
    FLOATS,
    GROUP,
    INT,
    INTS,
    LANES,
    SUMS_BYTES,
    VOID,
    Floats,
    add,
    compiled,
    copy_group,
    divide,
    entered,
    exponent,
    fill,
    fma,
    larger_size,
    largest_size,
    load,
    load_bfloat16,
    load_int,
    maximum,
    minimum,
    operation,
    quantize_group,
    rounded,
    scaled_down,
    store,
    store_float,
    times,
    total,
    two_to_the,
    write,
)

ZERO, ONE, MINUS_ONE = np.float32(0.0), np.float32(1.0), np.float32(-1.0)
_TWO, _MINUS_TWO = np.float32(2.0), np.float32(-2.0)
_GELU_SCALE, _GELU_CUBE = np.float32(0.7978845608028654), np.float32(0.044715)
_GATE_LIMIT, _GATE_SLOPE = np.float32(7.0), np.float32(1.702)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)  # beyond, e^x does not fit into a float
# Cody and Waite's reduction and the polynomial of Cephes' expf.
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_E0, _E1, _E2 = np.float32(1.9875691e-4), np.float32(1.3981999e-3), np.float32(8.3334519e-3)
_LARGEST = np.float32(127.0)
_LEAST_SCALE = np.float32(1e-30)  # of a channel of zeros, whose integers are zeros, too
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_ZERO = 128  # weights are unsigned bytes around this
_FOUR = 4 * PANEL  # bytes from four weights of a channel to the next four
# The polynomial of Cephes' logf, between the roots of 1/2 and 2.
_L0, _L1, _L2 = np.float32(7.0376836292e-2), np.float32(-1.1514610310e-1), np.float32(1.1676998740e-1)
_L3, _L4, _L5 = np.float32(-1.2420140846e-1), np.float32(1.4249322787e-1), np.float32(-1.6668057665e-1)
_L6, _L7, _L8 = np.float32(2.0000714765e-1), np.float32(-2.4999993993e-1), np.float32(3.3333331174e-1)
_MINUS_HALF = np.float32(-0.5)
_E3, _E4, _E5 = np.float32(4.1665796e-2), np.float32(1.6666665e-1), np.float32(0.5)


@compiled
def exponential(x: Floats) -> Floats:
    """Return e^x; what is below -87 or above 88 counts as these, and NaN stays NaN."""
    x = minimum(fill(_MOST), maximum(fill(_LEAST), x))
    whole = rounded(times(x, fill(_LOG2_E)))
    rest = fma(whole, fill(-_LN2_HIGH), x)
    rest = fma(whole, fill(-_LN2_LOW), rest)
    y = fma(fill(_E0), rest, fill(_E1))
    y = fma(y, rest, fill(_E2))
    y = fma(y, rest, fill(_E3))
    y = fma(y, rest, fill(_E4))
    y = fma(y, rest, fill(_E5))
    y = add(fma(times(rest, rest), y, rest), fill(ONE))
    return times(y, two_to_the(whole))


@compiled
def logarithm(x: Floats) -> Floats:
    """Return the natural logarithm of normal numbers above 0."""
    whole = exponent(x)
    rest = add(scaled_down(x, whole), fill(MINUS_ONE))
    square = times(rest, rest)
    y = fma(fill(_L0), rest, fill(_L1))
    for factor in (_L2, _L3, _L4, _L5, _L6, _L7, _L8):
        y = fma(y, rest, fill(factor))
    y = fma(whole, fill(_LN2_LOW), times(y, times(rest, square)))
    y = add(rest, fma(square, fill(_MINUS_HALF), y))
    return fma(whole, fill(_LN2_HIGH), y)


@compiled
def softplus(x: Floats) -> Floats:
    """Return log(1 + e^x)."""
    small = exponential(minimum(x, times(x, fill(MINUS_ONE))))
    sum_of_both = add(fill(ONE), small)
    lost = add(small, times(add(sum_of_both, fill(MINUS_ONE)), fill(MINUS_ONE)))  # by rounding the sum
    return add(maximum(x, fill(ZERO)), add(logarithm(sum_of_both), divide(lost, sum_of_both)))


@compiled
def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + e^-x)."""
    return divide(fill(ONE), add(fill(ONE), exponential(times(x, fill(MINUS_ONE)))))


@compiled
def silu(x: Floats) -> Floats:
    """Return x / (1 + e^-x)."""
    return divide(x, add(fill(ONE), exponential(times(x, fill(MINUS_ONE)))))


@compiled
def gelu(x: Floats) -> Floats:
    """Return x / (1 + e^-2z) with z = sqrt(2 / pi) (x + 0.044715 x^3): GELU as it is approximated by a tanh of z."""
    cube = times(times(x, x), x)
    z = times(fma(cube, fill(_GELU_CUBE), x), fill(_GELU_SCALE))
    return divide(x, add(fill(ONE), exponential(times(z, fill(_MINUS_TWO)))))


@compiled
def clamped_gate(gate: Floats, up: Floats) -> Floats:
    """Return (u + 1) g / (1 + e^-1.702g) with g at most 7 and u between -7 and 7, as gpt-oss has it."""
    gate = minimum(fill(_GATE_LIMIT), gate)
    up = add(minimum(fill(_GATE_LIMIT), maximum(fill(-_GATE_LIMIT), up)), fill(ONE))
    return times(divide(gate, add(fill(ONE), exponential(times(gate, fill(-_GATE_SLOPE))))), up)


@compiled
def capped(x: Floats, cap: Floats) -> Floats:
    """Return cap * tanh(x / cap)."""
    away = divide(fill(_TWO), add(exponential(times(divide(x, cap), fill(_TWO))), fill(ONE)))
    return times(add(fill(ONE), times(away, fill(MINUS_ONE))), cap)


@compiled
def add_row(x: int, out: int, padded: int) -> None:
    """Add a row to another one."""
    for at in range(0, 4 * padded, 4 * LANES):
        store(out + at, add(load(out + at), load(x + at)))


@compiled
def scale_row(x: int, factor: float, padded: int) -> None:
    """Multiply a row by a factor, in place."""
    factors = fill(factor)
    for at in range(0, 4 * padded, 4 * LANES):
        store(x + at, times(load(x + at), factors))


@compiled
def rms_norm(x: int, weight: int, out: int, width: int, padded: int, eps: float) -> None:
    """Write the norm of a row of ``width``; its padding must be 0, and stays so."""
    squares = fill(ZERO)
    for at in range(0, 4 * padded, 4 * LANES):
        part = load(x + at)
        squares = fma(part, part, squares)
    factor = fill(ONE / np.sqrt(total(squares) / np.float32(width) + eps))
    for at in range(0, 4 * padded, 4 * LANES):
        store(out + at, times(times(load(x + at), factor), load(weight + at)))


@compiled
def centre(x: int, out: int, width: int, padded: int) -> None:
    """Write a row of ``width`` less its mean; its padding must be 0, and stays so."""
    sums = fill(ZERO)
    for at in range(0, 4 * padded, 4 * LANES):
        sums = add(sums, load(x + at))
    less = fill(-total(sums) / np.float32(width))
    for at in range(0, 4 * padded, 4 * LANES):
        store(out + at, add(load(x + at), less))
    for at in range(4 * width, 4 * padded, 4):
        store_float(out + at, ZERO)


class Activations(NamedTuple):
    """Addresses of rows as products take them; behind the sums lie the rows as floats."""

    numbers: int  # their bytes
    scales: int
    sums: int


class Output(NamedTuple):
    """Floats that products are written to, or added to."""

    at: int
    row_bytes: int
    adds: int  # 1: to what is there


@compiled
def tile_size(num_rows: int, first: int) -> int:
    """Return how many rows the tile that starts at a row has: as few tiles as can be, of nearly one size."""
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    size = num_rows // num_tiles
    return size + 1 if first < num_rows % num_tiles * (size + 1) else size


@compiled
def scales_behind(numbers: int, num_rows: int, num_groups: int) -> int:
    """Return where the scales of rows lie: behind their bytes."""
    return numbers + GROUP * num_rows * num_groups


@compiled
def sums_behind(scales: int, num_rows: int, num_groups: int) -> int:
    """Return where the sums of rows lie: behind their scales."""
    return scales + 4 * num_rows * num_groups


@compiled
def floats_behind(sums: int, num_rows: int, num_groups: int) -> int:
    """Return where the rows lie as floats: behind their sums."""
    return sums + SUMS_BYTES * num_rows * num_groups


@compiled
def room_behind(sums: int, num_rows: int, num_groups: int) -> int:
    """Return what is free behind all of them, and behind the room for a row that `prepare_rows` needs."""
    return floats_behind(sums, num_rows, num_groups) + 4 * GROUP * num_groups * (num_rows + 1)


@compiled
def prepare_group(
    takes: int, x: int, before: int, row: int, rows_of_tile: int, inputs: Activations, floats: int
) -> None:
    """Make a group of a row's activations what a product takes: bytes, floats, or both.

    Args:
        before: how many groups of rows lie before those that the tile has of this group.
        row: its place in the tile.
        inputs, floats: addresses of all tiles' bytes, scales and so on.
    """
    if takes & AS_BYTES:
        scale, sum_of_row = inputs.scales + 4 * (before + row), inputs.sums + SUMS_BYTES * before + 4 * row
        quantize_group(x, inputs.numbers + GROUP * (before + row), scale, sum_of_row, 4 * rows_of_tile)
    if takes & AS_FLOATS:
        copy_group(x, floats + 4 * GROUP * before + 4 * LANES * row, 4 * LANES * rows_of_tile)


@entered
def prepare_rows(
    takes: int, x: int, x_bytes: int, num_rows: int, width: int, norm: int, centres: int, num_groups: int,
    eps: float, inputs: Activations, chosen: int,
) -> None:  # fmt: skip
    """Make rows what products take, tile after tile; behind ``sums`` is room for them as floats, and for one more.

    Args:
        takes: AS_BYTES, AS_FLOATS, or their sum.
        norm: weight of a norm to apply first; 0 for none.
        centres: the norm subtracts the mean first.
        chosen: address of the rows' indices; 0 for all rows in their order.
    """
    as_floats = floats_behind(inputs.sums, num_rows, num_groups)
    room = as_floats + 4 * GROUP * num_rows * num_groups
    first = 0
    while first < num_rows:
        size = tile_size(num_rows, first)
        for row in range(size):
            source = x + (load_int(chosen + 8 * (first + row)) if chosen else first + row) * x_bytes
            if norm and centres:
                centre(source, room, width, GROUP * num_groups)
                source = room
            if norm:
                rms_norm(source, norm, room, width, GROUP * num_groups, eps)
                source = room
            for group in range(num_groups):
                prepare_group(
                    takes, source + 4 * GROUP * group, first * num_groups + group * size, row, size, inputs, as_floats
                )
        first += size


@compiled
def expanded_panels(linear: LinearEntry, num_rows: int, start: int, stop: int, num_groups: int, room: int) -> int:
    """Expand panels ``start`` to ``stop`` of a linear layer into a room, if rows make several tiles.

    Returns:
        Their address for `multiply_tile`; 0 if they are multiplied as they are stored, as without a room (0).
    """
    if room == 0 or linear.expands_from == 0 or num_rows < linear.expands_from:
        return 0
    first = linear.panels + start * linear.panel_bytes
    expand_panels(linear.expander, first, linear.panel_bytes, stop - start, num_groups, room)
    return room


@compiled
def multiply_tile(
    linear: LinearEntry, num_rows: int, first: int, size: int, start: int, stop: int, expanded: int,
    inputs: Activations, num_groups: int, out: Output,
) -> None:  # fmt: skip
    """Multiply the tile of ``size`` rows from ``first`` on by panels ``start`` to ``stop`` of a linear layer.

    Args:
        expanded: where `expanded_panels` left them; 0: they are as stored.
    """
    multiplier, panels, panel_bytes = linear.multiplier, linear.panels, linear.panel_bytes
    if expanded:
        multiplier, panel_bytes = linear.expanded, linear.expanded_bytes * num_groups
        panels = expanded - start * panel_bytes
    before = first * num_groups
    x = inputs.numbers + GROUP * before
    if linear.takes == AS_FLOATS:
        x = floats_behind(inputs.sums, num_rows, num_groups) + 4 * GROUP * before
    multiply(
        multiplier, size, start, stop, panels, panel_bytes, x,
        inputs.scales + 4 * before, inputs.sums + SUMS_BYTES * before, num_groups, linear.channel_scales,
        linear.biases, out.at, out.row_bytes, out.adds,
    )  # fmt: skip


@entered
def project(
    linear: LinearEntry, num_rows: int, start: int, stop: int, inputs: Activations, num_groups: int, out: Output,
    room: int,
) -> None:  # fmt: skip
    """Multiply all rows by panels ``start`` to ``stop`` of the linear layer whose entry is given.

    Args:
        room: for GROUP / PANEL expanded panels; 0: there is none.
    """
    at = start
    while at < stop:
        # Few enough to stay in the core's cache for the next tile.
        end = stop if num_rows <= MOST_ROWS else min(at + GROUP // PANEL, stop)
        expanded, first = expanded_panels(linear, num_rows, at, end, num_groups, room), 0
        while first < num_rows:
            size = tile_size(num_rows, first)
            multiply_tile(
                linear, num_rows, first, size, at, end, expanded, inputs, num_groups,
                Output(out.at + first * out.row_bytes, out.row_bytes, out.adds),
            )  # fmt: skip
            first += size
        at = end


@operation(VOID, INT, FLOATS)
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


@entered
def pack(source: int, is_bfloat16: int, num_out: int, num_in: int, panels: int, panel_bytes: int, scales: int) -> None:
    """Write the bytes and the scales of a weight; padding must be there already.

    Args:
        source: address of [num_out, num_in] bfloat16 or float32; num_in is a multiple of LANES.
        panels: address of the panels, ``panel_bytes`` for each.
        scales: address of a float32 for each channel.
    """
    for row in range(num_out):
        weights = source + row * num_in * (2 if is_bfloat16 else 4)
        most = fill(ZERO)
        for index in range(0, num_in, LANES):
            most = larger_size(most, load_weights(weights, index, is_bfloat16))
        scale = max(largest_size(most) / _LARGEST, _LEAST_SCALE)
        store_float(scales + 4 * row, scale)
        factor = fill(ONE / scale)
        place = panels + row // PANEL * panel_bytes + 4 * (row % PANEL)
        for index in range(0, num_in, LANES):
            whole = rounded(times(load_weights(weights, index, is_bfloat16), factor))
            store_weights(place + _FOUR * (index // 4), whole)
