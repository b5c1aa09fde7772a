"""Products of weights that are floats, with activations that are floats.

A weight is widened to 32 bits, which is exact. Then follows one multiply-add after another, in the order of the inputs,
each rounded once. The lanes of a register are output channels, so no sum goes across lanes: its order is the same in
registers of any width, in tiles of any size.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.tiles import MOST_ROWS, PANEL, Format, Group, in_register
from card.kernels.jit.vectors import (
    FLOATS,
    GROUP,
    LANES,
    bfloat16s_of,
    fetch,
    fma_of,
    halves_of,
    loop,
    moved,
    read,
    repeated,
)

_I64, _F32 = ir.IntType(64), ir.FloatType()
_INPUTS = 4  # whose multiply-adds are written one behind the other, in a loop over the group
_AHEAD = 4096  # bytes of weights on their way from memory while others are used
_HAS_LARGE_FILE = MOST_ROWS == LANES  # 32 registers of 16 numbers; else half as much room
# (up to so many rows, so many panels beside each other): enough sums under way for the unit's latency.
_PANELS = ((4, 4), (8, 2), (16, 1)) if _HAS_LARGE_FILE else ((1, 4), (3, 2), (6, 1))


def _panels_of(num_rows: int) -> int:
    return next(panels for most, panels in _PANELS if num_rows <= most)


def _format_of(num_bytes: int, widened: Callable[[Builder, Value], Value]) -> Format:
    """Return how a group of weights of so many bytes each is multiplied.

    Args:
        widened: (builder, address) to the 16 weights there as floats.
    """

    def add_group(builder: Builder, num_rows: int, group: Group, sums: list[list[Value]]) -> list[list[Value]]:
        num_panels, step = len(sums[0]), num_bytes * PANEL
        before = builder.mul(group.index, ir.Constant(_I64, GROUP * step))
        firsts = [builder.add(panel, before) for panel in group.panels]
        index, carried, end = loop(builder, ir.Constant(_I64, GROUP // _INPUTS), [one for row in sums for one in row])
        inputs = builder.mul(index, ir.Constant(_I64, _INPUTS))
        places = [builder.add(first, builder.mul(inputs, ir.Constant(_I64, step))) for first in firsts]
        line = builder.lshr(index, ir.Constant(_I64, (LANES // _INPUTS).bit_length() - 1))
        in_line = builder.and_(inputs, ir.Constant(_I64, LANES - 1))
        numbers = builder.add(group.numbers, builder.mul(line, ir.Constant(_I64, 4 * LANES * num_rows)))
        numbers = in_register(builder, builder.add(numbers, builder.mul(in_line, ir.Constant(_I64, 4))))
        new = [carried[row * num_panels : (row + 1) * num_panels] for row in range(num_rows)]
        for line in range(0, _INPUTS * step, 64):
            for place in places:
                fetch(builder, moved(builder, place, _AHEAD + line))
        for one in range(_INPUTS):
            weights = [widened(builder, moved(builder, place, step * one)) for place in places]
            for row in range(num_rows):
                number = read(builder, moved(builder, numbers, 4 * (LANES * row + one)), _F32)
                factor = repeated(builder, number, FLOATS)
                new[row] = [fma_of(builder, factor, *both) for both in zip(weights, new[row], strict=True)]
        end([one for row in new for one in row])
        return new

    return Format(add_group, _panels_of, number_bytes=4)


FORMATS = {
    "f32": _format_of(4, lambda builder, address: read(builder, address, FLOATS)),
    "f16": _format_of(2, halves_of),
    "bf16": _format_of(2, bfloat16s_of),
}
