"""Products of GGUF's Q4_0."""

from __future__ import annotations

from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.tiles import multiplier_of

SHAPE = BlockShape(part=32, bits=4, zero=8, scale="half")
_CODE = multiplier_of("q4_0", format_of(SHAPE))
MULTIPLY = _CODE.address  # in this process
