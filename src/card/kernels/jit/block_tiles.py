"""Products of weights in the blocks of GGUF files, with the numbers that the file holds.

A block has a scale for each 16 or 32 inputs of an output channel, and may have a smallest weight for them. A weight is
a whole number of 2 to 6 bits, or of 8, or four bits look it up in a table of these. For each such part of a row, the
products of whole numbers are added as integers; then come, in this order, one multiplication by the part's scale, one
multiply-add of its smallest weight with the sum of its activations, and one multiply-add with the scale of the
activations. Scales that GGUF holds as a byte times a number of 16 bits are multiplied first; that is exact in 32 bits.
Scales that are powers of two change no digit, and may be denormal numbers.

A panel begins with a header: for blocks of 256 inputs, the 16-bit scales of each channel, and behind them those of the
smallest weights. Then follow the groups of 64 inputs: scales of the parts, smallest weights of the parts, and the
weights of 16 channels. Four inputs of 16 channels are a *step*. The lower four or two bits of its weights take 64
bytes, which they share with those of the steps eight, or four, eight and twelve, further on. Higher bits follow, as
many steps to a byte as fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llvmlite import ir

from card.kernels.formats.block_format import STEP_BYTES, SUPER, BlockShape
from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.products import Product, Sums
from card.kernels.jit.tiles import PANEL, PRODUCT, Format, Group, in_register
from card.kernels.jit.vectors import FLOATS, GROUP, INTS, LANES, fetch, fma_of, moved, read, repeated, splat, write

# An integer below 2^22 that is added to this float's bits makes them those of the sum: no instruction converts.
_ORIGIN = 3.0 * (1 << 22)
_ORIGIN_BITS = 0x4B400000
_FEW = 3  # rows for which lanes are repeated in registers: they have too little else to do until memory answers
_AHEAD = 4096  # bytes of weights on their way from memory: the hardware cannot predict their order in a group
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALVES, _BYTES = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(_I8, LANES)


@dataclass(frozen=True, slots=True)
class _Places:
    """Addresses of one group of a panel."""

    header: Value
    group: Value


def _places(builder: Builder, shape: BlockShape, group: Group) -> _Places:
    """Return where a group of a panel lies."""
    [panel] = group.panels
    before = builder.mul(group.index, ir.Constant(_I64, shape.group_bytes))
    if not shape.header_bytes:
        return _Places(panel, in_register(builder, builder.add(panel, before)))
    of_block = builder.lshr(group.index, ir.Constant(_I64, (SUPER // GROUP).bit_length() - 1))
    blocks = builder.lshr(
        builder.add(group.num_groups, ir.Constant(_I64, SUPER // GROUP - 1)),
        ir.Constant(_I64, (SUPER // GROUP).bit_length() - 1),
    )
    size = ir.Constant(_I64, shape.header_bytes)
    first = builder.add(panel, builder.mul(blocks, size))
    header = builder.add(panel, builder.mul(of_block, size))
    return _Places(header, in_register(builder, builder.add(first, before)))


def _factor(builder: Builder, shape: BlockShape, at: _Places, part: int, *, is_minimum: bool) -> Value:
    """Return the scale or the smallest weight of a part, for 16 channels."""
    first = shape.parts * shape.scale_bytes if is_minimum else 0
    place = moved(builder, at.group, first + shape.scale_bytes * part)
    if shape.scale == "half":
        return builder.fpext(read(builder, place, _HALVES), FLOATS)
    if shape.scale == "exponent":
        return _powers(builder, builder.zext(read(builder, place, _BYTES), INTS))
    of_bytes = read(builder, place, _BYTES)
    whole = builder.sext(of_bytes, INTS) if shape.scale == "signed byte" else builder.zext(of_bytes, INTS)
    header = moved(builder, at.header, 2 * PANEL if is_minimum else 0)
    return builder.fmul(builder.sitofp(whole, FLOATS), builder.fpext(read(builder, header, _HALVES), FLOATS))


def _powers(builder: Builder, exponents: Value) -> Value:
    """Return 2^(e - 128) of exponents from 0 to 254; the first two are denormal numbers."""
    normal = builder.shl(builder.sub(exponents, splat(INTS, 1)), splat(INTS, 23))
    denormal = builder.shl(builder.add(exponents, splat(INTS, 1)), splat(INTS, 21))
    is_normal = builder.icmp_signed(">", exponents, splat(INTS, 1))
    return builder.bitcast(builder.select(is_normal, normal, denormal), FLOATS)


def _shifted(builder: Builder, product: Product, value: Value, left: int) -> Value:
    """Shift each byte; bits that come from a neighbour must be masked away."""
    lanes = ir.VectorType(_I32, product.lanes)
    words = builder.bitcast(value, lanes)
    amount = splat(lanes, abs(left))
    moved_bits = builder.shl(words, amount) if left >= 0 else builder.lshr(words, amount)
    return builder.bitcast(moved_bits, value.type) if left else value


def _stored(builder: Builder, product: Product, shape: BlockShape, group: Value, step: int) -> list[Value]:
    """Return the bits that are stored of a step's weights, in the parts that the product works on."""
    kind = ir.VectorType(_I8, 4 * product.lanes)
    parts = []
    for first in range(0, STEP_BYTES, kind.count):
        weights = None
        for plane in shape.planes:
            place = moved(builder, group, plane.place + STEP_BYTES * (step % plane.num_steps) + first)
            left = plane.first - plane.bits * (step // plane.num_steps)
            bits = _shifted(builder, product, read(builder, place, kind), left)
            bits = builder.and_(bits, splat(kind, ((1 << plane.bits) - 1) << plane.first))
            weights = bits if weights is None else builder.or_(weights, bits)
        parts.append(weights)
    return parts


def _sums_of_rows(builder: Builder, group: Group, num_rows: int, shape: BlockShape, part: int) -> Value:
    """Return the sums of 16 rows' activations of a part, a row in each lane; those beyond ``num_rows`` are anything."""
    count = shape.part // LANES
    sums = [read(builder, group.sums_at(builder, num_rows, 1 + count * part + i), INTS) for i in range(count)]
    return functools.reduce(builder.add, sums)


class _Lanes:
    """Lanes of a vector, to be repeated in all lanes of others: by way of memory, from which that costs nothing."""

    def __init__(self, builder: Builder, values: Value, count: int) -> None:
        self._values = values if count <= _FEW else None
        if self._values is not None:
            return
        with builder.goto_entry_block():
            room = builder.alloca(values.type)
        room.align = 64
        self._kind, self._place = values.type, builder.ptrtoint(room, _I64)
        write(builder, values, self._place)

    def repeated(self, builder: Builder, lane: int) -> Value:
        """Return a vector whose lanes all are this one."""
        if self._values is not None:
            return builder.shuffle_vector(self._values, self._values, splat(INTS, lane))
        return repeated(builder, read(builder, moved(builder, self._place, 4 * lane), self._kind.element), self._kind)


class Factors(NamedTuple):
    """Factors of the integers of a part, for 16 channels."""

    scales: Value
    less: Value | None  # the product of `_ORIGIN` with the scales, negative; None where it may be too large
    minima: Value | None  # smallest weights, if they have any


def factor_count(shape: BlockShape) -> int:
    """Return how many factors a part has."""
    return 1 + (shape.scale != "exponent") + shape.has_minimum


class GroupOfPanel(Protocol):
    """A group of a panel: its factors and its weights."""

    def factors(self, builder: Builder, part: int) -> Factors:
        """Return the factors of a part."""

    def weights(self, builder: Builder, step: int) -> list[Value]:
        """Return the weights of a step as the product takes them, in the parts that it works on."""

    def integers(self, builder: Builder, group: Group, part: int, starts: Sequence[Value]) -> Iterable[Value]:
        """Return the integers of a part, for each row: where it starts, and the products added."""


class StoredGroup:
    """A group of a panel as it is stored."""

    def __init__(self, builder: Builder, shape: BlockShape, group: Group) -> None:
        """Find the parts of a group, and prefetch the group that the product takes a little later."""
        self._shape, self._at = shape, _places(builder, shape, group)
        for line in range(0, shape.group_bytes, 64):
            fetch(builder, moved(builder, self._at.group, _AHEAD + line))

    def factors(self, builder: Builder, part: int) -> Factors:
        """Return the factors of a part."""
        shape, at = self._shape, self._at
        scales, less, minima = _factor(builder, shape, at, part, is_minimum=False), None, None
        if shape.scale != "exponent":  # of at most 19 bits, which times the two of `_ORIGIN` are exact
            less = builder.fmul(scales, splat(FLOATS, -_ORIGIN))
        if shape.has_minimum:
            minima = _factor(builder, shape, at, part, is_minimum=True)
        return Factors(scales, less, minima)

    def weights(self, builder: Builder, step: int) -> list[Value]:
        """Return the weights of a step as the product takes them, in the parts that it works on."""
        shape, group = self._shape, self._at.group
        if shape.bits == 8:
            return PRODUCT.read_weights(builder, moved(builder, group, shape.low_place + STEP_BYTES * step))
        stored = _stored(builder, PRODUCT, shape, group, step)
        if not shape.table:
            return stored
        less = 0 if shape.is_small or PRODUCT.has_unsigned_weights else shape.zero
        table = [(one - less) & 255 for one in shape.table]
        return [PRODUCT.look_up(builder, table, part) for part in stored]

    def integers(self, builder: Builder, group: Group, part: int, starts: Sequence[Value]) -> list[Value]:
        """Return the integers of a part, for each row: where it starts, and the products added."""
        return added_up(builder, self._shape, group, self, part, starts)


def added_up(
    builder: Builder, shape: BlockShape, group: Group, stored: GroupOfPanel, part: int, starts: Sequence[Value]
) -> list[Value]:
    """Return what the integers of a part are for each row, beginning with ``starts``: vector instructions add them."""
    sums = [Sums(builder, PRODUCT, start, most=shape.most) for start in starts]
    for step in range(part * shape.part // 4, (part + 1) * shape.part // 4):
        weights = stored.weights(builder, step)
        for row, total in enumerate(sums):
            total.add(builder, weights, PRODUCT.numbers_of(builder, group.four(builder, row, step)))
    return [total.result(builder) for total in sums]


def _starts(builder: Builder, shape: BlockShape, num_rows: int, group: Group, part: int) -> list[Value]:
    """Return what the integers of a part begin with, for each row: with `_ORIGIN`, and without the weights' zero."""
    zero = shape.zero if shape.is_small or PRODUCT.has_unsigned_weights else 0
    if not zero:
        return [splat(INTS, _ORIGIN_BITS)] * num_rows
    of_rows = _sums_of_rows(builder, group, num_rows, shape, part)
    of_zero = builder.add(builder.mul(of_rows, splat(INTS, -zero)), splat(INTS, _ORIGIN_BITS))
    lanes = _Lanes(builder, of_zero, num_rows)
    return [lanes.repeated(builder, row) for row in range(num_rows)]


def _scaled(builder: Builder, whole: Value, factors: Factors) -> Value:
    """Return the product with scales, rounded once, of integers in floats that are `_ORIGIN` larger."""
    if factors.less is None:
        return builder.fmul(builder.fadd(whole, splat(FLOATS, -_ORIGIN)), factors.scales)
    return fma_of(builder, whole, factors.scales, factors.less)


def format_of(
    shape: BlockShape,
    of_group: Callable[[Builder, BlockShape, Group], GroupOfPanel] = StoredGroup,
) -> Format:
    """Return how a group of such blocks is multiplied."""

    def add_group(builder: Builder, num_rows: int, group: Group, sums: Sequence[list[Value]]) -> list[list[Value]]:
        stored, totals = of_group(builder, shape, group), [row[0] for row in sums]
        for part in range(shape.parts):
            factors, counts = stored.factors(builder, part), None
            if factors.minima is not None:
                sums_of_rows = _sums_of_rows(builder, group, num_rows, shape, part)
                counts = _Lanes(builder, builder.sitofp(sums_of_rows, FLOATS), num_rows)
            starts = _starts(builder, shape, num_rows, group, part)
            for row, whole in enumerate(stored.integers(builder, group, part, starts)):
                value = _scaled(builder, builder.bitcast(whole, FLOATS), factors)
                if counts is not None:
                    value = fma_of(builder, counts.repeated(builder, row), factors.minima, value)
                totals[row] = fma_of(builder, value, group.scale(builder, row), totals[row])
        return [[total] for total in totals]

    return Format(add_group)
