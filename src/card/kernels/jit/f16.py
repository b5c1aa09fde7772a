"""Products of weights in float16."""

from __future__ import annotations

from card.kernels.jit.float_tiles import format_of
from card.kernels.jit.tiles import multiplier_of
from card.kernels.jit.vectors import halves_of

_CODE = multiplier_of("f16", format_of(2, halves_of))
MULTIPLY = _CODE.address  # in this process
