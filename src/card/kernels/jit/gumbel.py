"""Gumbel noise of tokens from Philox 4x64 with ten rounds, 64 tokens at a time.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". The bits are those of NumPy's `Philox`.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.rows import MINUS_ONE, ONE, ZERO, logarithm
from card.kernels.jit.vectors import (
    FLOATS,
    INT,
    INTS,
    LANES,
    VOID,
    Floats,
    add,
    compiled,
    divide,
    entered,
    fill,
    load,
    load_int,
    moved,
    operation,
    repeated,
    splat,
    store,
    times,
    write,
)

COUNTERS = LANES  # at a time
TOKENS = 4 * COUNTERS  # of a group: each counter gives four words
# Multipliers, steps from a round's key to the next, and rounds: section 3 of the source.
_FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LONGS = ir.VectorType(INT, COUNTERS)
_HALF_WORD, _LOW_HALF = splat(_LONGS, 32), splat(_LONGS, (1 << 32) - 1)
_UNUSED_BITS = 12  # of 64: 52 make a number between 0 and 1, as in `card.tree.noise`
_LAST = (1 << 64 - _UNUSED_BITS) - 1
_UNIT = np.float32(2.0**-52)


def _product(builder: Builder, x: Value, y: int) -> tuple[Value, Value]:
    """Return the upper and the lower half of products of unsigned numbers, made of products of their halves."""
    y_low, y_high = (splat(_LONGS, half) for half in (y % 2**32, y // 2**32))
    x_low, x_high = builder.and_(x, _LOW_HALF), builder.lshr(x, _HALF_WORD)
    lowest = builder.mul(x_low, y_low)
    middle = builder.add(builder.mul(x_high, y_low), builder.lshr(lowest, _HALF_WORD))
    other = builder.add(builder.mul(x_low, y_high), builder.and_(middle, _LOW_HALF))
    carried = builder.add(builder.lshr(middle, _HALF_WORD), builder.lshr(other, _HALF_WORD))
    low = builder.or_(builder.shl(other, _HALF_WORD), builder.and_(lowest, _LOW_HALF))
    return builder.add(builder.mul(x_high, y_high), carried), low


def _words(builder: Builder, counter: Value, position: Value, keys: list[Value]) -> list[Value]:
    """Return the words of 64 bits that some counters, one after the other, give at a position."""
    steps = ir.Constant(_LONGS, list(range(COUNTERS)))
    counters = builder.add(repeated(builder, counter, _LONGS), steps)
    words = [counters, splat(_LONGS, 0), repeated(builder, position, _LONGS), splat(_LONGS, 0)]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (_product(builder, words[2 * i], _FACTORS[i]) for i in range(2))
        first, third = (
            builder.xor(builder.xor(high, word), repeated(builder, key, _LONGS))
            for high, word, key in zip((high_1, high_0), words[1::2], keys, strict=True)
        )
        words = [first, low_1, third, low_0]
        keys = [builder.add(key, ir.Constant(INT, step)) for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return words


def _interleaved(builder: Builder, x: Value, y: Value) -> list[Value]:
    """Return two vectors of the lanes of two others in turns."""
    turns = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    return [builder.shuffle_vector(x, y, ir.Constant(INTS, part)) for part in (turns[:LANES], turns[LANES:])]


@operation(VOID, INT, INT, INT, INT, INT)
def draw_numbers(
    builder: Builder, counter: Value, position: Value, low_key: Value, high_key: Value, place: Value
) -> None:
    """Leave 64 random numbers between 0 and 1 in steps of 2^-52, as they are or, nearer to 1, as what they lack of it.

    The latter are negative. So a float keeps what is near either end.
    """
    numbers = []
    for word in _words(builder, counter, position, [low_key, high_key]):
        up = builder.lshr(word, splat(_LONGS, _UNUSED_BITS))
        down = builder.sub(splat(_LONGS, _LAST), up)
        is_low = builder.icmp_signed("<", up, down)
        near = builder.fadd(builder.sitofp(builder.select(is_low, up, down), FLOATS), splat(FLOATS, 0.5))
        numbers.append(builder.select(is_low, near, builder.fneg(near)))
    for i, (x, y) in enumerate(zip(*(_interleaved(builder, *numbers[i::2]) for i in range(2)), strict=True)):
        for j, part in enumerate(_interleaved(builder, x, y)):
            write(builder, part, moved(builder, place, 4 * LANES * (2 * i + j)))


@operation(FLOATS, FLOATS, FLOATS, FLOATS)
def where_positive(builder: Builder, x: Value, then: Value, other: Value) -> Value:
    """Return lanes of ``then`` where x is above 0, else of ``other``."""
    return builder.select(builder.fcmp_ordered(">", x, splat(FLOATS, 0.0)), then, other)


@compiled
def gumbel(number: Floats) -> Floats:
    """Return -log(-log u) of random numbers u as `draw_numbers` leaves them, within 1e-5."""
    number = times(number, fill(_UNIT))
    rest = add(number, fill(ONE))  # what is below 1 by less than a float holds is 1
    lost = add(number, times(add(rest, fill(MINUS_ONE)), fill(MINUS_ONE)))
    log = add(logarithm(where_positive(number, number, rest)), where_positive(number, fill(ZERO), divide(lost, rest)))
    return times(logarithm(times(log, fill(MINUS_ONE))), fill(MINUS_ONE))


@entered
def draw_noise(groups: int, count: int, position: int, low_key: int, high_key: int, out: int) -> None:
    """Draw the noise of groups of 64 tokens at a position.

    Args:
        groups: their numbers, a list; 0: from 0 on.
        low_key, high_key: the seed.
        out: room for 64 floats of each.
    """
    for i in range(count):
        group = i
        if groups:
            group = load_int(groups + 8 * i)
        place = out + 4 * TOKENS * i
        draw_numbers(COUNTERS * group + 1, position, low_key, high_key, place)
        for at in range(place, place + 4 * TOKENS, 4 * LANES):
            store(at, gumbel(load(at)))
