"""The matrix unit of newer Intel processors (AMX): it multiplies all rows of a tile with 16 channels at once.

It has eight tiles of 16 rows of 64 bytes. A product takes one with activations, [rows][depth] signed bytes, and one
with weights, [depth / 4][16][4] unsigned bytes, and adds to one of sums, [rows][16] integers of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.vectors import INTS, LANES, call, moved, read
from card.machine.processor import kernel_kind

# Rows of a tile from which the unit is used. Evidence: at 300 M it is faster from 6 rows on, in a draft model of 4 M
# from 12 on, and below that both are alike (benchmarks/LOG.md).
MATRIX_ROWS = 6 if kernel_kind() == "amx" else 1 << 30
_I8, _I64, _VOID = ir.IntType(8), ir.IntType(64), ir.VoidType()
_LINE = 64  # bytes of a tile's row
_STRIDE = ir.Constant(_I64, _LINE)
_TILE_BYTES = _LINE * LANES
_ROWS, _WEIGHTS, _SUMS = range(0, 2), range(2, 4), range(4, 8)  # numbers of tiles


def around_tiles(depth: int) -> tuple[Callable[[Builder, int], None], Callable[[Builder, int], None]]:
    """Return what begins and ends the products of tiles of so many rows, for products that are so deep."""

    def begin(builder: Builder, num_rows: int) -> None:
        """Set the unit up."""
        if num_rows < MATRIX_ROWS:
            return
        heights = [depth // 4 if tile in _WEIGHTS else num_rows for tile in range(8)]
        widths = [byte for tile in range(8) for byte in (depth if tile in _ROWS else _LINE, 0)]
        setting = bytes([1, *[0] * 15, *widths, *[0] * 16, *heights, *[0] * 8])
        content = ir.Constant(ir.ArrayType(_I8, len(setting)), bytearray(setting))
        place = ir.GlobalVariable(builder.module, content.type, f"tiles_of_{num_rows}")
        place.initializer, place.linkage, place.global_constant = content, "internal", True
        call(builder, "llvm.x86.ldtilecfg", _VOID, builder.bitcast(place, ir.PointerType()))

    def end(builder: Builder, num_rows: int) -> None:
        """Release the tiles: a change of threads would save their contents each time."""
        if num_rows >= MATRIX_ROWS:
            call(builder, "llvm.x86.tilerelease", _VOID)

    return begin, end


def products(
    builder: Builder, num_rows: int, depth: int, pairs: Sequence[tuple[Value, Value]]
) -> list[Iterator[Value]]:
    """Write products of tiles; return what yields each pair's rows, vectors of 16 integers, read when they are used.

    Args:
        depth: inputs of each: 16, 32 or 64.
        pairs: up to four addresses of activations, a row each 64 bytes, and of weights.
    """
    with builder.goto_entry_block():
        buffer = builder.alloca(ir.ArrayType(_I8, _TILE_BYTES * len(pairs)), name="products")
    buffer.align = 64
    room = builder.ptrtoint(buffer, _I64)
    places = [
        [moved(builder, room, _TILE_BYTES * i + _LINE * row) for row in range(num_rows)] for i in range(len(pairs))
    ]
    for i, (numbers, weights) in enumerate(pairs):
        rows_tile, weights_tile, sums_tile = _ROWS[i % 2], _WEIGHTS[i % 2], _SUMS[i]
        _load(builder, rows_tile, numbers)
        _load(builder, weights_tile, weights)
        call(builder, "llvm.x86.tilezero", _VOID, _tile(sums_tile))
        operands = [_tile(tile) for tile in (sums_tile, rows_tile, weights_tile)]
        call(builder, "llvm.x86.tdpbsud", _VOID, *operands)
        call(builder, "llvm.x86.tilestored64", _VOID, _tile(sums_tile), _pointer(builder, places[i][0]), _STRIDE)
    return [(read(builder, place, INTS) for place in of_pair) for of_pair in places]


def _load(builder: Builder, tile: int, address: Value) -> None:
    """Load a tile whose rows lie 64 bytes apart."""
    call(builder, "llvm.x86.tileloadd64", _VOID, _tile(tile), _pointer(builder, address), _STRIDE)


def _tile(number: int) -> Value:
    return ir.Constant(_I8, number)


def _pointer(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, ir.PointerType())
