"""Products of GGUF's Q8_0."""

from __future__ import annotations

from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.tiles import multiplier_of

SHAPE = BlockShape(part=32, bits=8, zero=128, scale="half")
_CODE = multiplier_of("q8_0", format_of(SHAPE))
MULTIPLY = _CODE.address  # in this process
