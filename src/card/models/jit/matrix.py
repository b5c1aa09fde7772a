"""The matrix unit of newer Intel processors (AMX): products of 64 bytes of up to 16 rows with 16 channels at once.

Its integers are exact, as those of VNNI are, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from card.models.jit.vectors import GROUP, INTS, LANES, Builder, Value, call, fetch, moved, read
from card.models.processor import has_matrix_unit

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_VOID = ir.VoidType()
_TILE_BYTES = GROUP * LANES
_AHEAD = 8192  # bytes of weights on their way from memory while others are used
_ROWS, _WEIGHTS, _PRODUCTS = 0, 1, 4  # first tiles of activations, of weights and of sums: there are eight in all
# Rows of a tile from which the unit is used. Evidence: at 300 M it is faster from 6 rows on, in a draft model of 4 M
# from 12 on, and below that both are alike (benchmarks/LOG.md).
MATRIX_ROWS = 6 if has_matrix_unit() else 1 << 30


def _tile(number: int) -> Value:
    return ir.Constant(_I8, number)


def _pointer(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, ir.PointerType())


def begin_matrix(builder: Builder, num_rows: int) -> None:
    """Set the unit up for tiles of so many rows: activations and sums have them, weights 16 times four channels."""
    heights = [num_rows if tile not in (_WEIGHTS, _WEIGHTS + 1) else GROUP // 4 for tile in range(8)]
    widths = [byte for _ in range(8) for byte in (GROUP, 0)]
    setting = bytes([1, *[0] * 15, *widths, *[0] * 16, *heights, *[0] * 8])
    place = cgutils.global_constant(builder, f"tiles_of_{num_rows}", cgutils.make_bytearray(setting))
    call(builder, "llvm.x86.ldtilecfg", _VOID, builder.bitcast(place, ir.PointerType()))


def end_matrix(builder: Builder) -> None:
    """Let go of the tiles: what other code keeps of them would be saved at each change of threads."""
    call(builder, "llvm.x86.tilerelease", _VOID)


def matrix_products(builder: Builder, num_rows: int, numbers: Value, panels: Sequence[Value]) -> Any:
    """Return the products of a group as vectors of 16 integers, [row][panel].

    Args:
        numbers: address of the group's activations, [rows][64] signed bytes.
        panels: addresses of its weights, [16][16][4] unsigned bytes each.
    """
    with builder.goto_entry_block():  # numba's own way to do this fills it with zeros at each call
        kept = builder.alloca(ir.ArrayType(_I8, _TILE_BYTES * len(panels)), name="products")
    kept.align = 64
    room, stride = builder.ptrtoint(kept, _I64), ir.Constant(_I64, GROUP)
    call(builder, "llvm.x86.tileloadd64", _VOID, _tile(_ROWS), _pointer(builder, numbers), stride)
    for i, panel in enumerate(panels):
        for line in range(0, _TILE_BYTES, 64):
            fetch(builder, moved(builder, panel, _AHEAD // len(panels) + line))
        call(builder, "llvm.x86.tilezero", _VOID, _tile(_PRODUCTS + i))
        call(builder, "llvm.x86.tileloadd64", _VOID, _tile(_WEIGHTS + i), _pointer(builder, panel), stride)
        call(builder, "llvm.x86.tdpbsud", _VOID, _tile(_PRODUCTS + i), _tile(_ROWS), _tile(_WEIGHTS + i))
        place = _pointer(builder, moved(builder, room, _TILE_BYTES * i))
        call(builder, "llvm.x86.tilestored64", _VOID, _tile(_PRODUCTS + i), place, stride)
    return [
        [read(builder, moved(builder, room, _TILE_BYTES * i + GROUP * row), INTS) for i in range(len(panels))]
        for row in range(num_rows)
    ]
