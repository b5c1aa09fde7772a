"""Vector instructions that multiply bytes, four inputs of each output channel at a time; one `Product` for each kind.

Weights come as unsigned bytes around 128, activations as signed bytes from -127 to 127. All kinds give the same
integers: their sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info

from card.kernels.formats.block_format import SMALL
from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.vectors import LANES, call, read, repeated, splat

_I1, _I8, _I16, _I32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_LARGE_TILES = ((16, 1),)  # 32 registers of 16 numbers
_SMALL_TILES = ((6, 1),)  # 16 registers of 8, or 32 of 4
_LOOK_UPS = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b", 4: "llvm.aarch64.neon.tbl1.v16i8"}
_SIGN = splat(ir.VectorType(_I8, 32), 0x80)
_NAMES_BYTES = llvm_version_info[0] >= 22  # how LLVM wants the bytes of a VNNI product: as bytes or as integers


@dataclass(frozen=True, slots=True)
class Product:
    """Instructions for products, and the tiles that suit the registers.

    A *part* is what one instruction works on: ``lanes`` output channels.
    """

    lanes: int  # output channels of a part
    has_unsigned_weights: bool  # 128 too large: a sum then begins at -128 times the sum of the activations
    most_rows: int  # of a tile: their sums fill the registers
    panels: Sequence[tuple[int, int]]  # (up to so many rows, so many panels beside each other)
    weights_of: Callable[[Builder, Value], Value]  # what is read from a panel, to what `add` takes
    numbers_of: Callable[[Builder, Value], Value]  # four bytes of a row, as an integer, to what `add` takes
    add: Callable[[Builder, Value, Value, Value], Value]  # (sum, weights, numbers) to the new sum
    add_small: Callable[[Builder, Value, Value, Value], Value]  # the same for weights from 0 to 63, as they are read
    small_sum: Any  # type of the sums that `add_small` makes of a part
    widen: Callable[[Builder, Value], Value]  # such a sum, to integers of 32 bits

    def panels_of(self, num_rows: int) -> int:
        """Return how many panels a tile has: more share each activation, fewer fit the registers."""
        return next(panels for most, panels in self.panels if num_rows <= most)

    def read_weights(self, builder: Builder, address: Value) -> list[Value]:
        """Return the parts of four weights of each channel of a panel."""
        kind = ir.VectorType(_I8, 4 * self.lanes)
        step = ir.Constant(ir.IntType(64), 4 * self.lanes)
        parts = []
        for _ in range(LANES // self.lanes):
            parts.append(self.weights_of(builder, read(builder, address, kind)))
            address = builder.add(address, step)
        return parts

    def look_up(self, builder: Builder, table: Sequence[int], indices: Value) -> Value:
        """Return bytes of a table of 16 at indices, of a part: what `add` or `add_small` takes."""
        numbers = ir.Constant(indices.type, [*table] * (self.lanes // 4))  # instructions look into 16 bytes at a time
        return call(builder, _LOOK_UPS[self.lanes], indices.type, numbers, indices)

    def split(self, builder: Builder, sums: Value) -> list[Value]:
        """Return the parts of a panel's sums."""
        if self.lanes == LANES:
            return [sums]
        places = [range(first, first + self.lanes) for first in range(0, LANES, self.lanes)]
        return [builder.shuffle_vector(sums, sums, ir.Constant(_ints(self.lanes), list(part))) for part in places]

    def join(self, builder: Builder, parts: Sequence[Value]) -> Value:
        """Return a panel's sums from their parts."""
        if len(parts) == 1:
            return parts[0]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        places = ir.Constant(_ints(2 * LANES // len(parts)), list(range(2 * LANES // len(parts))))
        return self.join(builder, [builder.shuffle_vector(low, high, places) for low, high in pairs])


class Sums:
    """Sums of a panel's products with one row, while they are added up."""

    def __init__(self, builder: Builder, product: Product, start: Value, *, most: int) -> None:
        """Begin with 16 integers.

        Args:
            most: the largest weight. Those beyond 63 are signed, or around 128; smaller ones are from 0 on.
        """
        self._product, self._add = product, product.add_small if most < SMALL else product.add
        self._wide = product.split(builder, start)
        self._narrow: list[Value] = []  # sums of 16 bits where `add_small` makes such, and how many more fit
        self._is_short = most < SMALL and product.small_sum.element == _I16
        self._room = self._most = ((1 << 15) - 1) // (2 * most * 127)

    def add(self, builder: Builder, weights: Sequence[Value], numbers: Value) -> None:
        """Add the products with four of the row's numbers."""
        before = self._wide
        if self._is_short:
            if self._room == 0:
                self._widen(builder)
            before = self._narrow or [splat(self._product.small_sum, 0)] * len(weights)
            self._room -= 1
        sums = [self._add(builder, *both, numbers) for both in zip(before, weights, strict=True)]
        if self._is_short:
            self._narrow = sums
        else:
            self._wide = sums

    def _widen(self, builder: Builder) -> None:
        wide = [self._product.widen(builder, part) for part in self._narrow]
        self._wide = [builder.add(*both) for both in zip(self._wide, wide, strict=True)]
        self._narrow, self._room = [], self._most

    def result(self, builder: Builder) -> Value:
        """Return the sums, 16 integers."""
        if self._narrow:
            self._widen(builder)
        return self._product.join(builder, self._wide)


def _ints(lanes: int) -> Any:
    return ir.VectorType(_I32, lanes)


def _unchanged(builder: Builder, value: Value) -> Value:
    return value


def _bytes(builder: Builder, value: Value, lanes: int) -> Value:
    return builder.bitcast(repeated(builder, value, _ints(lanes)), ir.VectorType(_I8, 4 * lanes))


def _settled(builder: Builder, total: Value) -> Value:
    """Return a sum, and let LLVM have it made by now: it would put off all sums of a row, and keep all weights."""
    kind = ir.FunctionType(total.type, [total.type])
    return builder.asm(kind, "", "=x,0", [total], True)


def _vnni(lanes: int, most_rows: int, panels: Sequence[tuple[int, int]]) -> Product:
    """Return the product of one instruction, VPDPBUSD."""
    operands = ir.VectorType(_I8, 4 * lanes) if _NAMES_BYTES else _ints(lanes)

    def add(builder: Builder, total: Value, weights: Value, numbers: Value) -> Value:
        weights, numbers = (builder.bitcast(value, operands) for value in (weights, numbers))
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", _ints(lanes), total, weights, numbers)

    return Product(
        lanes=lanes,
        has_unsigned_weights=True,
        most_rows=most_rows,
        panels=panels,
        weights_of=_unchanged,
        numbers_of=lambda builder, four: _bytes(builder, four, lanes),
        add=add,
        add_small=add,
        small_sum=_ints(lanes),
        widen=_unchanged,
    )


def _avx2() -> Product:
    """Return the product of AVX2's instructions, which multiply unsigned by signed bytes and add pairs in 16 bits.

    Unsigned weights would leave 16 bits. So the weights become signed, and their signs move to the activations: a pair
    is then 2 * 127 * 127 at most.
    """
    lanes = 8
    shorts = ir.VectorType(_I16, 2 * lanes)
    ones = splat(shorts, 1)

    def numbers_of(builder: Builder, four: Value) -> tuple[Value, Value]:
        numbers = _bytes(builder, four, lanes)
        return numbers, call(builder, "llvm.abs.v32i8", numbers.type, numbers, ir.Constant(_I1, 0))

    def add(builder: Builder, total: Value, weights: Value, numbers: Any) -> Value:
        signed, sizes = numbers
        weights = call(builder, "llvm.x86.avx2.psign.b", weights.type, weights, signed)
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, sizes, weights)
        return _settled(builder, builder.add(total, widen(builder, pairs)))

    def add_small(builder: Builder, total: Value, weights: Value, numbers: Any) -> Value:
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, weights, numbers[0])
        return _settled(builder, builder.add(total, pairs))

    def widen(builder: Builder, pairs: Value) -> Value:
        return call(builder, "llvm.x86.avx2.pmadd.wd", _ints(lanes), pairs, ones)

    return Product(
        lanes=lanes,
        has_unsigned_weights=False,
        most_rows=_SMALL_TILES[-1][0],
        panels=_SMALL_TILES,
        weights_of=lambda builder, weights: builder.xor(weights, _SIGN),
        numbers_of=numbers_of,
        add=add,
        add_small=add_small,
        small_sum=shorts,
        widen=widen,
    )


def _arm(name: str, *, has_unsigned_weights: bool) -> Product:
    """Return the product of one instruction of ARM's, SDOT or USDOT."""
    lanes, sums = 4, _ints(4)

    def add(builder: Builder, total: Value, weights: Value, numbers: Value) -> Value:
        return call(builder, f"llvm.aarch64.neon.{name}.v4i32.v16i8", sums, total, weights, numbers)

    def signed(builder: Builder, weights: Value) -> Value:
        return builder.xor(weights, splat(weights.type, 0x80))

    return Product(
        lanes=lanes,
        has_unsigned_weights=has_unsigned_weights,
        most_rows=_SMALL_TILES[-1][0],
        panels=_SMALL_TILES,
        weights_of=_unchanged if has_unsigned_weights else signed,
        numbers_of=lambda builder, four: _bytes(builder, four, lanes),
        add=add,
        add_small=add,
        small_sum=sums,
        widen=_unchanged,
    )


def product_of(kind: str) -> Product:
    """Return the product of a kind of `card.machine.processor.KERNEL_KINDS`; the matrix unit's is that of few rows."""
    if kind.startswith("arm"):
        return (
            _arm("usdot", has_unsigned_weights=True) if kind == "arm-i8mm" else _arm("sdot", has_unsigned_weights=False)
        )
    if kind == "avx2":
        return _avx2()
    return _vnni(8, 6, _SMALL_TILES) if kind == "avx-vnni" else _vnni(LANES, 16, _LARGE_TILES)
