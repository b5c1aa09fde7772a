"""Products of GGUF's Q4_K."""

from __future__ import annotations

from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.tiles import multiplier_of

SHAPE = BlockShape(part=32, bits=4, scale="byte", has_minimum=True)
_CODE = multiplier_of("q4_k", format_of(SHAPE))
MULTIPLY = _CODE.address  # in this process
