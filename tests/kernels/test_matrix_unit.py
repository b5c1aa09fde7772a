"""What the matrix unit is told to do, done by a made-up unit that knows Intel's manual: no processor needs to have one.

Tiles and faults are as in the Intel 64 and IA-32 Architectures Software Developer's Manual, LDTILECFG and TDPBSUD.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llvmlite import binding

from card.kernels.blocks import block_linear, pack_blocks
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.int8_linear import quantize_linear, why_not_int8
from card.kernels.jit import byte_tiles, expanded_tiles, formats, matrix_unit
from card.kernels.jit.tiles import PRODUCT, multiplier_of
from card.kernels.jit.vectors import call
from card.kernels.packed_linear import multiply_rows
from tests.blocks import random_blocks

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(
    REASON is not None or not PRODUCT.has_unsigned_weights or PRODUCT.most_rows < 16,
    reason=str(REASON or "the unit stands beside VNNI's products of 16 rows"),
)
FORMATS = [form.name for form in BLOCK_FORMATS.values() if form.shape.bits < 8 and form.shape.part >= 32]


class MadeUpUnit:
    """Eight tiles, and what each instruction does with them."""

    def __init__(self) -> None:
        self.heights, self.widths = [0] * 8, [0] * 8
        self.tiles = np.zeros((8, 16, 64), np.uint8)
        self.num_products = 0
        self.faults: list[str] = []

    def ldtilecfg(self, address: int) -> None:
        setting = bytes((ctypes.c_uint8 * 64).from_address(address))
        assert setting[0] == 1
        assert not any(setting[1:16])
        self.widths = np.frombuffer(setting[16:32], np.uint16).tolist()
        self.heights = list(setting[48:56])
        assert max(self.widths) <= 64
        assert max(self.heights) <= 16
        self.tiles[:] = 0

    def tilerelease(self) -> None:
        self.heights, self.widths = [0] * 8, [0] * 8

    def tilezero(self, tile: int) -> None:
        self.tiles[tile] = 0

    def tileloadd64(self, tile: int, address: int, stride: int) -> None:
        width = self.widths[tile]
        assert width
        for row in range(self.heights[tile]):
            self.tiles[tile, row, :width] = (ctypes.c_uint8 * width).from_address(address + stride * row)

    def tilestored64(self, tile: int, address: int, stride: int) -> None:
        for row in range(self.heights[tile]):
            ctypes.memmove(address + stride * row, self.tiles[tile, row].tobytes(), self.widths[tile])

    def tdpbsud(self, sums: int, numbers: int, weights: int) -> None:
        rows, depth = self.heights[sums], self.widths[numbers]
        assert rows
        assert len({sums, numbers, weights}) == 3
        assert self.heights[numbers] == rows
        assert self.heights[weights] == depth // 4
        assert self.widths[weights] == self.widths[sums]
        signed = self.tiles[numbers, :rows, :depth].view(np.int8).astype(np.int32)
        columns = self.tiles[weights, : depth // 4].reshape(depth // 4, 16, 4).transpose(0, 2, 1).reshape(depth, 16)
        before = self.tiles[sums, :rows].view(np.int32)
        self.tiles[sums, :rows] = (before + signed @ columns.astype(np.int32)).astype(np.int32).view(np.uint8)
        self.num_products += 1


_KINDS = {
    "ldtilecfg": (ctypes.c_void_p,),
    "tilerelease": (),
    "tilezero": (ctypes.c_uint8,),
    "tileloadd64": (ctypes.c_uint8, ctypes.c_void_p, ctypes.c_int64),
    "tilestored64": (ctypes.c_uint8, ctypes.c_void_p, ctypes.c_int64),
    "tdpbsud": (ctypes.c_uint8, ctypes.c_uint8, ctypes.c_uint8),
}


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[MadeUpUnit]:
    """Let code that is compiled now call a made-up unit wherever it would use a real one."""
    made, kept = MadeUpUnit(), []

    def guarded(name: str) -> Any:
        def run(*values: int) -> None:
            try:
                getattr(made, name)(*values)
            except AssertionError as error:  # which machine code would swallow
                made.faults.append(f"{name}{values}: {error}")

        return run

    for name, kinds in _KINDS.items():
        kept.append(ctypes.CFUNCTYPE(None, *kinds)(guarded(name)))
        binding.add_symbol(f"made_up_{name}", ctypes.cast(kept[-1], ctypes.c_void_p).value)

    def made_up_call(builder: Any, name: str, result: Any, *values: Any) -> Any:
        return call(builder, name.replace("llvm.x86.", "made_up_"), result, *values)

    monkeypatch.setattr(matrix_unit, "call", made_up_call)
    for module in (matrix_unit, byte_tiles, expanded_tiles):
        monkeypatch.setattr(module, "MATRIX_ROWS", 6)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield made
    assert not made.faults
    assert not any(made.heights), "tiles stay in use behind the products"


def rows(num_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(num_rows).standard_normal((num_rows, width), np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_expanded_blocks_have_the_products_of_vector_instructions(name, unit, monkeypatch) -> None:
    form = next(one for one in BLOCK_FORMATS.values() if one.name == name)
    linear = block_linear(pack_blocks(random_blocks(form, 48, 256), form), form, 48)
    name, size = f"made_up_{form.product}", expanded_tiles.expanded_bytes(form.shape)
    made = expanded_tiles.expander_of(name, form.shape), expanded_tiles.expanded_multiplier_of(name, form.shape)
    monkeypatch.setattr(formats, "expanding", lambda _: (17, *made, size))
    for num_rows in (17, 64, 165):  # tiles of 8 and 9, of 16, of 15
        x, unit.num_products = rows(num_rows, 256), 0
        assert np.array_equal(multiply_rows(x, linear), multiply_rows(x, linear, expands=False))
        assert unit.num_products == form.shape.parts * 256 // 64 * 3 * -(-num_rows // 16)  # of parts, panels and tiles


@pytest.mark.parametrize("num_rows", [5, 6, 9, 16])
def test_bytes_have_the_products_of_vector_instructions(num_rows, unit, monkeypatch) -> None:
    linear, x = quantize_linear(rows(80, 192), None), rows(num_rows, 192)
    begin, end = matrix_unit.around_tiles(64)
    form = byte_tiles.Format(byte_tiles.FORMAT.add_group, lambda _: 1, begin, end)
    code = multiplier_of("made_up_byte", form)
    monkeypatch.setattr(formats, "multiplier", lambda _: code)
    alone = [multiply_rows(one[None], linear) for one in x]  # by vector instructions
    assert np.array_equal(multiply_rows(x, linear), np.concatenate(alone))
    assert (unit.num_products > 0) == (num_rows >= 6)
