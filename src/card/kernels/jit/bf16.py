"""Products of weights in bfloat16."""

from __future__ import annotations

from numba import cfunc, types

from card.kernels.jit.float_tiles import format_of
from card.kernels.jit.tiles import multiplier_of
from card.kernels.jit.vectors import bfloat16s_of

_multiply = multiplier_of(format_of(2, bfloat16s_of))


@cfunc(types.void(types.int64), cache=True)
def _multiply_panels(arguments: int) -> None:
    _multiply(arguments)


MULTIPLY = _multiply_panels.address  # in this process
