"""Products of bytes: some rows of activations times 16 to 64 output channels, weights read once.

Weights are unsigned bytes around 128, in panels of 16 output channels: [in / 4][16][4]. Activations are signed bytes in
groups of GROUP with a scale each. A group's products are added as 32-bit integers, which is exact. Then each group is
scaled and added as a float, in the order of the groups. So an output depends on its own row and channel alone, whatever
tile it is computed in, and whatever instruction multiplied it.

Vector instructions (`card.kernels.jit.products`) take four bytes of a row at a time, and the rows of a tile lie beside
each other: [in / 4][rows][4]. The matrix unit of newer Intel processors (AMX) multiplies the whole group of a tile at
once, from `MATRIX_ROWS` rows on, and each row's bytes of a group lie together: [in / 64][rows][64].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from card.kernels.jit.products import product_of
from card.kernels.jit.vectors import (
    FLOATS,
    GROUP,
    INTS,
    LANES,
    Builder,
    Value,
    call,
    fetch,
    fma_of,
    loop,
    moved,
    operation,
    read,
    repeated,
    write,
)
from card.machine.processor import kernel_kind

PANEL = LANES  # output channels
_KIND = kernel_kind() or ""
_PRODUCT = product_of(_KIND)
MOST_ROWS = _PRODUCT.most_rows
_I8, _I32, _I64, _F32, _VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
_FETCHED_ROWS = 3  # from which weights are fetched ahead: fewer only wait for memory, which fetches by itself then
_TILE_BYTES = GROUP * LANES
_AHEAD = 8192  # bytes of weights on their way from memory while others are used
_ROWS, _WEIGHTS, _PRODUCTS = 0, 1, 4  # first tiles of activations, of weights and of sums: there are eight in all
# Rows of a tile from which the unit is used. Evidence: at 300 M it is faster from 6 rows on, in a draft model of 4 M
# from 12 on, and below that both are alike (benchmarks/LOG.md).
MATRIX_ROWS = 6 if _KIND == "amx" else 1 << 30


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


def _panels_of(num_rows: int) -> int:
    """Return how many panels beside each other are fastest: more share each activation, fewer fit the registers."""
    return 2 if num_rows >= MATRIX_ROWS else _PRODUCT.panels_of(num_rows)


def _products(builder: Builder, num_rows: int, num_panels: int, starts: Sequence[Value], at: dict[str, Value]) -> Any:
    """Return the integers [row][panel]: where each row starts, with a group's products added four at a time."""
    sums = [[_PRODUCT.split(builder, start)] * num_panels for start in starts]
    for four in range(GROUP // 4):
        places = [moved(builder, panel, 4 * LANES * four) for panel in at["panels"]]
        weights = [_PRODUCT.read_weights(builder, place) for place in places]
        for place in places if num_rows >= _FETCHED_ROWS else ():
            fetch(builder, moved(builder, place, _AHEAD // num_panels))
        for row in range(num_rows):
            place = moved(builder, at["numbers"], 4 * (four * num_rows + row))
            numbers = _PRODUCT.numbers_of(builder, read(builder, place, _I32))
            for panel in range(num_panels):
                parts = zip(sums[row][panel], weights[panel], strict=True)
                sums[row][panel] = [_PRODUCT.add(builder, total, part, numbers) for total, part in parts]
    return [[_PRODUCT.join(builder, parts) for parts in row] for row in sums]


def _write_group(builder: Builder, num_rows: int, num_panels: int, sums: Any, at: dict[str, Value]) -> Any:
    """Write the instructions for one group; return the new sums [row][panel]."""
    starts = [ir.Constant(INTS, [0] * LANES)] * num_rows
    if _PRODUCT.has_unsigned_weights:
        places = [moved(builder, at["starts"], 4 * row) for row in range(num_rows)]
        starts = [repeated(builder, read(builder, place, _I32), INTS) for place in places]
    if num_rows >= MATRIX_ROWS:
        products = matrix_products(builder, num_rows, at["numbers"], at["panels"])
        whole = [[builder.add(start, one) for one in row] for start, row in zip(starts, products, strict=True)]
    else:
        whole = _products(builder, num_rows, num_panels, starts, at)
    new = []
    for row in range(num_rows):
        scale = repeated(builder, read(builder, moved(builder, at["scales"], 4 * row), _F32), FLOATS)
        new.append(
            [
                fma_of(builder, builder.sitofp(whole[row][panel], FLOATS), scale, sums[row][panel])
                for panel in range(num_panels)
            ]
        )
    return new


def _write_tile(builder: Builder, num_rows: int, num_panels: int, values: Any) -> None:
    """Write the loop over the groups, and what is done with its sums."""
    panel, panel_bytes, numbers, scales, starts, num_groups, channel_scales, biases, out, out_bytes, adds = values
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    index, carried, end = loop(builder, num_groups, [zero] * (num_rows * num_panels))
    sums = [carried[row * num_panels : (row + 1) * num_panels] for row in range(num_rows)]
    first = builder.add(panel, builder.mul(index, ir.Constant(_I64, GROUP * PANEL)))
    of_rows = builder.mul(index, ir.Constant(_I64, 4 * num_rows))
    new = _write_group(
        builder,
        num_rows,
        num_panels,
        sums,
        {
            "panels": [builder.add(first, builder.mul(panel_bytes, ir.Constant(_I64, i))) for i in range(num_panels)],
            "numbers": builder.add(numbers, builder.mul(index, ir.Constant(_I64, GROUP * num_rows))),
            "scales": builder.add(scales, of_rows),
            "starts": builder.add(starts, of_rows),
        },
    )
    end([value for row in new for value in row])
    is_added = builder.icmp_signed("!=", adds, ir.Constant(_I64, 0))
    for i in range(num_panels):
        scale = read(builder, moved(builder, channel_scales, 4 * PANEL * i), FLOATS)
        bias = read(builder, moved(builder, biases, 4 * PANEL * i), FLOATS)
        for row in range(num_rows):
            place = moved(builder, builder.add(out, builder.mul(out_bytes, ir.Constant(_I64, row))), 4 * PANEL * i)
            value = fma_of(builder, new[row][i], scale, bias)
            value = builder.select(is_added, builder.fadd(value, read(builder, place, FLOATS)), value)
            write(builder, value, place)


def _write_panels(builder: Builder, num_rows: int, num_panels: int, start: Value, stop: Value, values: Any) -> Value:
    """Write a loop over whole groups of panels; return the first panel that is left."""
    panels, panel_bytes, numbers, scales, starts, num_groups, channel_scales, biases, out, out_bytes, adds = values
    before = builder.block
    test, body, after = (builder.append_basic_block(name) for name in ("panels", "tile", "left"))
    builder.branch(test)
    builder.position_at_end(test)
    index = builder.phi(_I64)
    index.add_incoming(start, before)
    following = builder.add(index, ir.Constant(_I64, num_panels))
    builder.cbranch(builder.icmp_signed("<=", following, stop), body, after)
    builder.position_at_end(body)
    of_channels = builder.mul(index, ir.Constant(_I64, 4 * PANEL))
    _write_tile(
        builder,
        num_rows,
        num_panels,
        (
            builder.add(panels, builder.mul(index, panel_bytes)),
            panel_bytes,
            numbers,
            scales,
            starts,
            num_groups,
            builder.add(channel_scales, of_channels),
            builder.add(biases, of_channels),
            builder.add(out, of_channels),
            out_bytes,
            adds,
        ),
    )
    index.add_incoming(following, builder.block)
    builder.branch(test)
    builder.position_at_end(after)
    return index


@operation(types.void, *[types.int64] * 14)
def _multiply(builder: Builder, num_rows: Value, start: Value, stop: Value, *values: Value) -> None:
    """Write one branch for each number of rows."""
    done = builder.append_basic_block("multiplied")
    switch = builder.switch(num_rows, done)
    for rows in range(1, MOST_ROWS + 1):
        branch = builder.append_basic_block(f"rows{rows}")
        switch.add_case(ir.Constant(_I64, rows), branch)
        builder.position_at_end(branch)
        left = start
        if rows >= MATRIX_ROWS:
            begin_matrix(builder, rows)
        for num_panels in sorted({_panels_of(rows), 1}, reverse=True):
            left = _write_panels(builder, rows, num_panels, left, stop, values)
        if rows >= MATRIX_ROWS:
            end_matrix(builder)
        builder.branch(done)
    builder.position_at_end(done)


@cfunc(types.void(*[types.int64] * 14), cache=True)
def _multiply_panels(
    num_rows: int, start: int, stop: int, panels: int, panel_bytes: int, numbers: int, scales: int, starts: int,
    num_groups: int, channel_scales: int, biases: int, out: int, out_bytes: int, adds: int,
) -> None:  # fmt: skip
    """Compile the branches once; other compiled code calls them by their address."""
    _multiply(
        num_rows, start, stop, panels, panel_bytes, numbers, scales, starts, num_groups, channel_scales, biases, out,
        out_bytes, adds,
    )  # fmt: skip


MULTIPLY = _multiply_panels.address  # in this process


@operation(types.void, *[types.int64] * 15)
def multiply(builder: Builder, address: Value, *values: Value) -> None:
    """Compute output channels 16 ``start`` to 16 ``stop`` of a tile of 1 to MOST_ROWS rows.

    Args, all integers: MULTIPLY; num_rows; start; stop; then
        panels, panel_bytes: address of the weights, and bytes of each panel.
        numbers, scales, starts: addresses of the tile's activations, their scales and -128 times their sums, as
            `quantize_group` leaves them.
        num_groups: of the activations.
        channel_scales, biases: addresses of a float32 for each channel.
        out, out_bytes: address of the first row of float32, and bytes of each row.
        adds: 1 to add to what ``out`` holds, 0 to replace it.
    """
    kind = ir.FunctionType(ir.VoidType(), [_I64] * len(values))
    builder.call(builder.inttoptr(address, kind.as_pointer()), values)
