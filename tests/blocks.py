"""Random blocks of GGUF's formats, also of those that no package of Python can quantise to."""

from __future__ import annotations

import numpy as np

from card.kernels.formats.block_format import BlockFormat, Bytes


def random_blocks(form: BlockFormat, num_out: int, num_in: int, seed: int = 0) -> Bytes:
    """Return rows of blocks [num_out, bytes] with any numbers but -128, and scales around 0."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (num_out, num_in // form.inputs, form.num_bytes), dtype=np.uint8)
    raw[raw == 128] = 127
    if form.shape.scale == "exponent":
        raw[..., form.halves] = generator.integers(110, 130, (*raw.shape[:2], 1))
        return raw.reshape(num_out, -1)
    halves = raw[..., form.halves]
    numbers = generator.standard_normal((*halves.shape[:2], halves.shape[2] // 2)) / 64
    raw[..., form.halves] = numbers.astype(np.float16).view(np.uint8)
    return raw.reshape(num_out, -1)
