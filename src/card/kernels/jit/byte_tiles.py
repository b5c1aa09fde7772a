"""Products of our own 8-bit weights: unsigned bytes around 128, in panels of 16 output channels, [in / 4][16][4].

Vector instructions (`card.kernels.jit.products`) take four bytes of a row at a time. The matrix unit of newer Intel
processors (AMX) multiplies the whole group of a tile at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from llvmlite import ir

from card.kernels.jit import matrix_unit
from card.kernels.jit.matrix_unit import MATRIX_ROWS
from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.tiles import AHEAD, FETCHED_ROWS, PANEL, PRODUCT, Format, Group
from card.kernels.jit.vectors import FLOATS, GROUP, INTS, LANES, fetch, fma_of, moved, read, repeated, splat

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _panels_of(num_rows: int) -> int:
    return 1 if num_rows >= MATRIX_ROWS else PRODUCT.panels_of(num_rows)


def _products(builder: Builder, num_rows: int, group: Group, panels: Sequence[Value], starts: Sequence[Value]) -> Any:
    """Return the integers [row][panel]: where each row starts, with a group's products added four at a time."""
    sums = [[PRODUCT.split(builder, start)] * len(panels) for start in starts]
    for four in range(GROUP // 4):
        places = [moved(builder, panel, 4 * LANES * four) for panel in panels]
        weights = [PRODUCT.read_weights(builder, place) for place in places]
        for place in places if num_rows >= FETCHED_ROWS else ():
            fetch(builder, moved(builder, place, AHEAD // len(panels)))
        for row in range(num_rows):
            numbers = PRODUCT.numbers_of(builder, group.four(builder, row, four))
            for panel in range(len(panels)):
                parts = zip(sums[row][panel], weights[panel], strict=True)
                sums[row][panel] = [PRODUCT.add(builder, total, part, numbers) for total, part in parts]
    return [[PRODUCT.join(builder, parts) for parts in row] for row in sums]


def _add_group(builder: Builder, num_rows: int, group: Group, sums: list[list[Value]]) -> list[list[Value]]:
    """Write the instructions for one group; return the new sums [row][panel]."""
    before = builder.mul(group.index, ir.Constant(_I64, GROUP * PANEL))
    panels = [builder.add(panel, before) for panel in group.panels]
    starts: Iterator[Value] = repeat(splat(INTS, 0), num_rows)
    if PRODUCT.has_unsigned_weights:
        sums_at = group.sums_at(builder, num_rows, 0)
        of_rows = (read(builder, moved(builder, sums_at, 4 * row), _I32) for row in range(num_rows))
        starts = (repeated(builder, one, INTS) for one in of_rows)
    whole: Iterable[list[Value]]
    if num_rows >= MATRIX_ROWS:
        [panel] = panels
        for line in range(0, GROUP * PANEL, 64):
            fetch(builder, moved(builder, panel, AHEAD + line))
        [products] = matrix_unit.products(builder, num_rows, GROUP, [(group.numbers, panel)])
        whole = ([builder.add(*both)] for both in zip(starts, products, strict=True))
    else:
        whole = _products(builder, num_rows, group, panels, list(starts))
    scales = [group.scale(builder, row) for row in range(num_rows)]
    return [
        [fma_of(builder, builder.sitofp(one, FLOATS), scale, total) for one, total in zip(products, row, strict=True)]
        for products, scale, row in zip(whole, scales, sums, strict=True)
    ]


FORMAT = Format(_add_group, _panels_of, *matrix_unit.around_tiles(GROUP))
