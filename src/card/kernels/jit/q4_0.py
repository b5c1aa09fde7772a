"""Products of GGUF's Q4_0."""

from __future__ import annotations

from numba import cfunc, types

from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.tiles import multiplier_of

SHAPE = BlockShape(part=32, bits=4, zero=8, scale="half")
_multiply = multiplier_of(format_of(SHAPE))


@cfunc(types.void(types.int64), cache=True)
def _multiply_panels(arguments: int) -> None:
    _multiply(arguments)


MULTIPLY = _multiply_panels.address  # in this process
