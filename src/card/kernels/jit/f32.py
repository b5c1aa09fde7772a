"""Products of weights in float32."""

from __future__ import annotations

from card.kernels.jit.float_tiles import format_of
from card.kernels.jit.tiles import multiplier_of
from card.kernels.jit.vectors import FLOATS, read

_CODE = multiplier_of("f32", format_of(4, lambda builder, address: read(builder, address, FLOATS)))
MULTIPLY = _CODE.address  # in this process
