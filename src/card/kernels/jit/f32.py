"""Products of weights in float32."""

from __future__ import annotations

from numba import cfunc, types

from card.kernels.jit.float_tiles import format_of
from card.kernels.jit.tiles import multiplier_of
from card.kernels.jit.vectors import FLOATS, read

_multiply = multiplier_of(format_of(4, lambda builder, address: read(builder, address, FLOATS)))


@cfunc(types.void(types.int64), cache=True)
def _multiply_panels(arguments: int) -> None:
    _multiply(arguments)


MULTIPLY = _multiply_panels.address  # in this process
