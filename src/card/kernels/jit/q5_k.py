"""Products of GGUF's Q5_K."""

from __future__ import annotations

from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.tiles import multiplier_of

SHAPE = BlockShape(part=32, bits=5, scale="byte", has_minimum=True)
_CODE = multiplier_of("q5_k", format_of(SHAPE))
MULTIPLY = _CODE.address  # in this process
