"""Products of GGUF's Q5_1."""

from __future__ import annotations

from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.tiles import multiplier_of

SHAPE = BlockShape(part=32, bits=5, scale="half", has_minimum=True)
_CODE = multiplier_of("q5_1", format_of(SHAPE))
MULTIPLY = _CODE.address  # in this process
