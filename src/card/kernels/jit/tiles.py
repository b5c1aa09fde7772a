"""Tiles of a product: some rows of activations times 16 to 64 output channels, weights read once.

A `Format` says how weights are stored and how a group of them is multiplied; here is what all formats share. Weights
lie in panels of 16 output channels, whose layout is the format's own. For weights that are whole numbers, activations
are signed bytes in groups of GROUP with a scale each. The products of a group are added as integers of 32 bits, which
is exact; then they are scaled and added as floats, in the order of the groups. Weights that are floats take activations
that are floats, and one multiply-add follows another. So an output depends on its own row and channel alone, whatever
tile it is computed in, and whatever instruction multiplied it.

The rows of a tile lie beside each other, 64 bytes of each: bytes as [in / 64][rows][64], floats as [in / 16][rows][16].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from card.kernels.jit.object_code import Builder, ObjectCode, Value
from card.kernels.jit.products import product_of
from card.kernels.jit.vectors import (
    FLOATS,
    GROUP,
    INT,
    LANES,
    SUMS_BYTES,
    VOID,
    fma_of,
    loop,
    moved,
    operation,
    read,
    repeated,
    splat,
    write,
)
from card.machine.processor import kernel_kind

PANEL = LANES  # output channels
PRODUCT = product_of(kernel_kind() or "")
MOST_ROWS = PRODUCT.most_rows  # of a tile
FETCHED_ROWS = 3  # from which weights are fetched ahead: fewer only wait for memory, which fetches by itself then
AHEAD = 8192  # bytes of weights on their way from memory while others are used
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_ARGUMENTS = 14


def in_register(builder: Builder, address: Value) -> Value:
    """Return an address that LLVM is to have in one register.

    x86 splits instructions of three operands whose address is the sum of two: products then wait for being issued.
    """
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0", [address], True)


@dataclass(frozen=True, slots=True)
class Group:
    """Addresses of what the products of a group need."""

    index: Value  # of the group
    num_groups: Value
    panels: list[Value]  # each panel's first byte
    numbers: Value  # the rows' bytes of this group
    scales: Value  # the rows' scales of this group, one float32 behind the other
    sums: Value  # the rows' sums of this group, those that `quantize_group` leaves first of all rows, and so on

    def four(self, builder: Builder, row: int, index: int) -> Value:
        """Return four bytes of a row as an integer."""
        return read(builder, moved(builder, self.numbers, GROUP * row + 4 * index), _I32)

    def scale(self, builder: Builder, row: int) -> Value:
        """Return a row's scale in all lanes."""
        return repeated(builder, read(builder, moved(builder, self.scales, 4 * row), _F32), FLOATS)

    def sums_at(self, builder: Builder, num_rows: int, place: int) -> Value:
        """Return the address of one of the sums, of so many rows beside each other."""
        return moved(builder, self.sums, 4 * num_rows * place)


def _nothing(builder: Builder, num_rows: int) -> None:
    """Write no instructions."""


@dataclass(frozen=True, slots=True)
class Format:
    """Kind of weights, and the instructions that multiply a group of them."""

    # (builder, rows, group, sums [row][panel]) to the sums with this group's products
    add_group: Callable[[Builder, int, Group, list[list[Value]]], list[list[Value]]]
    panels_of: Callable[[int], int] = lambda num_rows: 1  # most panels beside each other, for so many rows
    begin: Callable[[Builder, int], None] = _nothing  # before the tiles of so many rows
    end: Callable[[Builder, int], None] = _nothing  # after them
    number_bytes: int = 1  # of an activation


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of `multiply` behind the number of rows and the panels."""

    panels: Value
    panel_bytes: Value
    numbers: Value
    scales: Value
    sums: Value
    num_groups: Value
    channel_scales: Value
    biases: Value
    out: Value
    out_bytes: Value
    adds: Value


def _write_tile(
    builder: Builder, form: Format, num_rows: int, num_panels: int, panel: Value, arguments: _Arguments
) -> None:
    """Write the loop over the groups of panels ``panel`` and following, and what is done with its sums."""
    first_panel = builder.add(arguments.panels, builder.mul(panel, arguments.panel_bytes))
    panels = [
        builder.add(first_panel, builder.mul(arguments.panel_bytes, ir.Constant(_I64, i))) for i in range(num_panels)
    ]
    channels = builder.mul(panel, ir.Constant(_I64, 4 * PANEL))
    zero = splat(FLOATS, 0.0)
    index, carried, end = loop(builder, arguments.num_groups, [zero] * (num_rows * num_panels))
    rows_before = builder.mul(index, ir.Constant(_I64, num_rows))
    activations = ((arguments.numbers, GROUP * form.number_bytes), (arguments.scales, 4), (arguments.sums, SUMS_BYTES))
    places = [builder.add(first, builder.mul(rows_before, ir.Constant(_I64, size))) for first, size in activations]
    group = Group(index, arguments.num_groups, panels, *(in_register(builder, place) for place in places))
    sums = [carried[row * num_panels : (row + 1) * num_panels] for row in range(num_rows)]
    new = form.add_group(builder, num_rows, group, sums)
    end([value for row in new for value in row])
    is_added = builder.icmp_signed("!=", arguments.adds, ir.Constant(_I64, 0))
    for i in range(num_panels):
        at = moved(builder, channels, 4 * PANEL * i)
        scale = read(builder, builder.add(arguments.channel_scales, at), FLOATS)
        bias = read(builder, builder.add(arguments.biases, at), FLOATS)
        for row in range(num_rows):
            place = builder.add(
                builder.add(arguments.out, builder.mul(arguments.out_bytes, ir.Constant(_I64, row))), at
            )
            value = fma_of(builder, new[row][i], scale, bias)
            value = builder.select(is_added, builder.fadd(value, read(builder, place, FLOATS)), value)
            write(builder, value, place)


def _write_panels(
    builder: Builder, form: Format, num_rows: int, num_panels: int, start: Value, stop: Value, arguments: _Arguments
) -> Value:
    """Write a loop over whole tiles of panels; return the first panel that is left."""
    before = builder.block
    test, body, after = (builder.append_basic_block(name) for name in ("panels", "tile", "left"))
    builder.branch(test)
    builder.position_at_end(test)
    index = builder.phi(_I64)
    index.add_incoming(start, before)
    following = builder.add(index, ir.Constant(_I64, num_panels))
    builder.cbranch(builder.icmp_signed("<=", following, stop), body, after)
    builder.position_at_end(body)
    _write_tile(builder, form, num_rows, num_panels, index, arguments)
    index.add_incoming(following, builder.block)
    builder.branch(test)
    builder.position_at_end(after)
    return index


def multiplier_of(name: str, form: Format, *, least_rows: int = 1) -> ObjectCode:
    """Return the code whose address `multiply` takes, for tiles of so many rows at least.

    It takes the address of `multiply`'s arguments behind the first one.

    Args:
        name: of the format.
    """

    def write_branches(builder: Builder, arguments: Value) -> None:
        values = [read(builder, moved(builder, arguments, 8 * i), _I64) for i in range(_ARGUMENTS)]
        num_rows, start, stop, *others = values
        arguments = _Arguments(*others)
        done = builder.append_basic_block("multiplied")
        switch = builder.switch(num_rows, done)
        for rows in range(least_rows, MOST_ROWS + 1):
            branch = builder.append_basic_block(f"rows{rows}")
            switch.add_case(ir.Constant(_I64, rows), branch)
            builder.position_at_end(branch)
            left = start
            form.begin(builder, rows)
            for num_panels in sorted({form.panels_of(rows), 1}, reverse=True):
                left = _write_panels(builder, form, rows, num_panels, left, stop, arguments)
            form.end(builder, rows)
            builder.branch(done)
        builder.position_at_end(done)

    return ObjectCode(name, write_branches)


def call_at(builder: Builder, address: Value, values: Sequence[Value]) -> None:
    """Call code that takes the address of its arguments, all integers."""
    with builder.goto_entry_block():
        room = builder.alloca(ir.ArrayType(_I64, len(values)))
    arguments = builder.ptrtoint(room, _I64)
    for i, value in enumerate(values):
        write(builder, value, moved(builder, arguments, 8 * i))
    kind = ir.FunctionType(ir.VoidType(), [_I64])
    builder.call(builder.inttoptr(address, kind.as_pointer()), [arguments])


@operation(VOID, *[INT] * (1 + _ARGUMENTS))
def multiply(builder: Builder, address: Value, *values: Value) -> None:
    """Compute output channels 16 ``start`` to 16 ``stop`` of a tile of 1 to MOST_ROWS rows.

    Args, all integers: the address of the format's code; num_rows; start; stop; then
        panels, panel_bytes: address of the weights, and bytes of each panel.
        numbers, scales, sums: addresses of the tile's activations, their scales and their sums, as `quantize_group`
            leaves them.
        num_groups: of the activations.
        channel_scales, biases: addresses of a float32 for each channel.
        out, out_bytes: address of the first row of float32, and bytes of each row.
        adds: 1 to add to what ``out`` holds, 0 to replace it.
    """
    call_at(builder, address, values)
