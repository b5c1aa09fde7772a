"""Products of our own 8-bit weights: unsigned bytes around 128, in panels of 16 output channels, [in / 4][16][4].

Vector instructions (`card.kernels.jit.products`) take four bytes of a row at a time. The matrix unit of newer Intel
processors (AMX) multiplies the whole group of a tile at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.tiles import AHEAD, FETCHED_ROWS, MATRIX_ROWS, PANEL, PRODUCT, Format, Group
from card.kernels.jit.vectors import FLOATS, GROUP, INTS, LANES, call, fetch, fma_of, moved, read, repeated, splat

_I8, _I32, _I64, _VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VoidType()
_TILE_BYTES = GROUP * LANES
_ROWS, _WEIGHTS, _PRODUCTS = 0, 1, 4  # first tiles of activations, of weights and of sums: there are eight in all


def _tile(number: int) -> Value:
    return ir.Constant(_I8, number)


def _pointer(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, ir.PointerType())


def _begin_matrix(builder: Builder, num_rows: int) -> None:
    """Set the unit up for tiles of so many rows: activations and sums have them, weights 16 times four channels."""
    if num_rows < MATRIX_ROWS:
        return
    heights = [num_rows if tile not in (_WEIGHTS, _WEIGHTS + 1) else GROUP // 4 for tile in range(8)]
    widths = [byte for _ in range(8) for byte in (GROUP, 0)]
    setting = bytes([1, *[0] * 15, *widths, *[0] * 16, *heights, *[0] * 8])
    content = ir.Constant(ir.ArrayType(_I8, len(setting)), bytearray(setting))
    place = ir.GlobalVariable(builder.module, content.type, f"tiles_of_{num_rows}")
    place.initializer, place.linkage, place.global_constant = content, "internal", True
    call(builder, "llvm.x86.ldtilecfg", _VOID, builder.bitcast(place, ir.PointerType()))


def _end_matrix(builder: Builder, num_rows: int) -> None:
    """Release the tiles: a change of threads would save their contents each time."""
    if num_rows >= MATRIX_ROWS:
        call(builder, "llvm.x86.tilerelease", _VOID)


def _matrix_products(builder: Builder, num_rows: int, numbers: Value, panels: Sequence[Value]) -> Any:
    """Return the products of a group as vectors of 16 integers, [row][panel].

    Args:
        numbers: address of the group's activations, [rows][64] signed bytes.
        panels: addresses of its weights, [16][16][4] unsigned bytes each.
    """
    with builder.goto_entry_block():
        buffer = builder.alloca(ir.ArrayType(_I8, _TILE_BYTES * len(panels)), name="products")
    buffer.align = 64
    room, stride = builder.ptrtoint(buffer, _I64), ir.Constant(_I64, GROUP)
    call(builder, "llvm.x86.tileloadd64", _VOID, _tile(_ROWS), _pointer(builder, numbers), stride)
    for i, panel in enumerate(panels):
        for line in range(0, _TILE_BYTES, 64):
            fetch(builder, moved(builder, panel, AHEAD // len(panels) + line))
        call(builder, "llvm.x86.tilezero", _VOID, _tile(_PRODUCTS + i))
        call(builder, "llvm.x86.tileloadd64", _VOID, _tile(_WEIGHTS + i), _pointer(builder, panel), stride)
        call(builder, "llvm.x86.tdpbsud", _VOID, _tile(_PRODUCTS + i), _tile(_ROWS), _tile(_WEIGHTS + i))
        place = _pointer(builder, moved(builder, room, _TILE_BYTES * i))
        call(builder, "llvm.x86.tilestored64", _VOID, _tile(_PRODUCTS + i), place, stride)
    return [
        [read(builder, moved(builder, room, _TILE_BYTES * i + GROUP * row), INTS) for i in range(len(panels))]
        for row in range(num_rows)
    ]


def _panels_of(num_rows: int) -> int:
    return 2 if num_rows >= MATRIX_ROWS else PRODUCT.panels_of(num_rows)


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
    starts = [splat(INTS, 0)] * num_rows
    if PRODUCT.has_unsigned_weights:
        sums_at = group.sums_at(builder, num_rows, 0)
        of_rows = [read(builder, moved(builder, sums_at, 4 * row), _I32) for row in range(num_rows)]
        starts = [repeated(builder, one, INTS) for one in of_rows]
    if num_rows >= MATRIX_ROWS:
        products = _matrix_products(builder, num_rows, group.numbers, panels)
        whole = [[builder.add(start, one) for one in row] for start, row in zip(starts, products, strict=True)]
    else:
        whole = _products(builder, num_rows, group, panels, starts)
    scales = [group.scale(builder, row) for row in range(num_rows)]
    return [
        [fma_of(builder, builder.sitofp(one, FLOATS), scale, total) for one, total in zip(products, row, strict=True)]
        for products, scale, row in zip(whole, scales, sums, strict=True)
    ]


FORMAT = Format(_add_group, _panels_of, _begin_matrix, _end_matrix)
