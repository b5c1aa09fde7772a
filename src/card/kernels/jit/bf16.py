"""Products of weights in bfloat16."""

from __future__ import annotations

from card.kernels.jit.float_tiles import format_of
from card.kernels.jit.tiles import multiplier_of
from card.kernels.jit.vectors import bfloat16s_of

_CODE = multiplier_of("bf16", format_of(2, bfloat16s_of))
MULTIPLY = _CODE.address  # in this process
