"""Products of GGUF's Q6_K."""

from __future__ import annotations

from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.tiles import multiplier_of

SHAPE = BlockShape(part=16, bits=6, zero=32, scale="signed byte")
_CODE = multiplier_of("q6_k", format_of(SHAPE))
MULTIPLY = _CODE.address  # in this process
