"""Panels of block formats, expanded: weights as the product takes them, and factors as floats.

A pass of many rows has many tiles, and each takes the bits of all weights apart anew. So the panels that tiles share
are expanded once, into memory that stays in the core's cache. A group of an expanded panel has the factors of its
parts, then the weights of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from llvmlite import ir

from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import STEP_BYTES, STEPS, BlockShape
from card.kernels.jit.block_tiles import Factors, StoredGroup, added_up, factor_count, format_of
from card.kernels.jit.matrix_unit import MATRIX_ROWS, around_tiles, products
from card.kernels.jit.object_code import Builder, ObjectCode, Value
from card.kernels.jit.tiles import MOST_ROWS, PRODUCT, Format, Group, call_at, in_register, multiplier_of
from card.kernels.jit.vectors import FLOATS, INT, LANES, VOID, loop, moved, operation, read, write
from card.machine.processor import kernel_kind

_UNIT_DEPTH = 32  # inputs of a part from which on the matrix unit is used: it takes as long for half as many
_FACTOR_BYTES = 4 * LANES
_ARGUMENTS = 5


def expanded_bytes(shape: BlockShape) -> int:
    """Return the bytes of a group of an expanded panel; 0 for formats whose weights are bytes as they are stored."""
    return 0 if shape.bits == 8 else _FACTOR_BYTES * factor_count(shape) * shape.parts + STEP_BYTES * STEPS


def expands_from(shape: BlockShape) -> int:
    """Return the rows from which on it pays to expand panels of a format (benchmarks/LOG.md).

    To expand costs what about 8 rows cost. Vector instructions then save an eighth, and nothing at four tiles; the
    matrix unit, which multiplies expanded panels alone, saves a fifth to a quarter.
    """
    return 4 * MOST_ROWS if kernel_kind() == "amx" and shape.part >= _UNIT_DEPTH else 7 * MOST_ROWS + 1


MOST_EXPANDED_BYTES = max(expanded_bytes(form.shape) for form in BLOCK_FORMATS.values())


class _ExpandedGroup:
    """A group of an expanded panel."""

    def __init__(self, builder: Builder, shape: BlockShape, group: Group) -> None:
        [panel] = group.panels
        before = builder.mul(group.index, ir.Constant(INT, expanded_bytes(shape)))
        self._shape, self._at = shape, in_register(builder, builder.add(panel, before))
        self._products: list[Iterator[Value]] = []  # of the matrix unit, of each part

    def factors_at(self, builder: Builder, part: int) -> Value:
        return moved(builder, self._at, _FACTOR_BYTES * factor_count(self._shape) * part)

    def weights_at(self, builder: Builder, step: int) -> Value:
        return moved(builder, self.factors_at(builder, self._shape.parts), STEP_BYTES * step)

    def factors(self, builder: Builder, part: int) -> Factors:
        """Return the factors of a part."""
        at, count = self.factors_at(builder, part), factor_count(self._shape)
        stored = iter([read(builder, moved(builder, at, _FACTOR_BYTES * i), FLOATS) for i in range(count)])
        has_less, has_minimum = self._shape.scale != "exponent", self._shape.has_minimum
        return Factors(next(stored), next(stored) if has_less else None, next(stored) if has_minimum else None)

    def weights(self, builder: Builder, step: int) -> list[Value]:
        """Return the weights of a step as the product takes them, in the parts that it works on."""
        kind, at = ir.VectorType(ir.IntType(8), 4 * PRODUCT.lanes), self.weights_at(builder, step)
        return [read(builder, moved(builder, at, first), kind) for first in range(0, STEP_BYTES, kind.count)]

    def integers(self, builder: Builder, group: Group, part: int, starts: Sequence[Value]) -> Iterable[Value]:
        """Return the integers of a part, for each row: where it starts, and the products added."""
        shape, num_rows = self._shape, len(starts)
        if num_rows < MATRIX_ROWS or shape.part < _UNIT_DEPTH:
            return added_up(builder, shape, group, self, part, starts)
        if not self._products:  # of all parts at once: one is on its way while another one is scaled
            places = [
                (moved(builder, group.numbers, shape.part * one), self.weights_at(builder, one * shape.part // 4))
                for one in range(shape.parts)
            ]
            self._products = products(builder, num_rows, shape.part, places)
        return (builder.add(*both) for both in zip(starts, self._products[part], strict=True))


def expanded_format(shape: BlockShape) -> Format:
    """Return how a group of expanded panels is multiplied."""
    form = format_of(shape, _ExpandedGroup)
    if shape.part < _UNIT_DEPTH:
        return form
    begin, end = around_tiles(shape.part)
    return replace(form, begin=begin, end=end)


def expander_of(name: str, shape: BlockShape) -> ObjectCode:
    """Return the code whose address `expand_panels` takes; ``name`` is that of the format."""

    def write_loops(builder: Builder, arguments: Value) -> None:
        values = [read(builder, moved(builder, arguments, 8 * i), INT) for i in range(_ARGUMENTS)]
        panels, panel_bytes, num_panels, num_groups, room = values
        panel, _, end_panel = loop(builder, num_panels, [])
        source = builder.add(panels, builder.mul(panel, panel_bytes))
        size = builder.mul(num_groups, ir.Constant(INT, expanded_bytes(shape)))
        target = builder.add(room, builder.mul(panel, size))
        index, _, end_group = loop(builder, num_groups, [])
        nothing = ir.Constant(INT, 0)
        stored = StoredGroup(builder, shape, Group(index, num_groups, [source], nothing, nothing, nothing))
        out = _ExpandedGroup(builder, shape, Group(index, num_groups, [target], nothing, nothing, nothing))
        for part in range(shape.parts):
            at = out.factors_at(builder, part)
            for i, factor in enumerate(one for one in stored.factors(builder, part) if one is not None):
                write(builder, factor, moved(builder, at, _FACTOR_BYTES * i))
        for step in range(STEPS):
            at = out.weights_at(builder, step)
            for i, weights in enumerate(stored.weights(builder, step)):
                write(builder, weights, moved(builder, at, 4 * PRODUCT.lanes * i))
        end_group([])
        end_panel([])

    return ObjectCode(f"{name}_expander", write_loops)


def expanded_multiplier_of(name: str, shape: BlockShape) -> ObjectCode:
    """Return the code for `multiply` of expanded panels: many rows make tiles that are half full at least."""
    return multiplier_of(f"{name}_expanded", expanded_format(shape), least_rows=MOST_ROWS // 2)


@operation(VOID, *[INT] * (1 + _ARGUMENTS))
def expand_panels(builder: Builder, address: Value, *values: Value) -> None:
    """Expand panels of a format.

    Args, all integers: the address of the format's expander; panels, panel_bytes: address of the first one, and bytes
        of each; num_panels; num_groups: of each; room: address of num_panels * num_groups * `expanded_bytes`.
    """
    call_at(builder, address, values)
