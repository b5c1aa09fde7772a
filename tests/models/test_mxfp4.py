"""MXFP4 of safetensors files becomes GGUF's, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from card.errors import ModelError
from card.kernels.formats import BLOCK_FORMATS
from card.models.files.mxfp4 import gguf_blocks

EXPERTS, OUT, BLOCKS = 3, 5, 4


def random_tensors() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (EXPERTS, OUT, BLOCKS, 16), dtype=np.uint8)
    return blocks, generator.integers(90, 160, (EXPERTS, OUT, BLOCKS), dtype=np.uint8)


def test_the_numbers_are_those_of_transformers_and_of_ggml() -> None:
    blocks, scales = random_tensors()
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    raw = gguf_blocks(blocks, scales)
    assert raw.shape == (EXPERTS, OUT, 17 * BLOCKS)
    for expert in range(EXPERTS):
        expected = theirs[expert].numpy().T
        assert np.array_equal(dequantize(raw[expert], Kind.MXFP4), expected)
        assert np.array_equal(BLOCK_FORMATS[Kind.MXFP4].numbers(raw[expert]), expected)


def test_other_shapes_and_dtypes_are_refused() -> None:
    blocks, scales = random_tensors()
    for wrong in ((blocks[:, 1:], scales), (blocks[..., :8], scales), (blocks.astype(np.int8), scales)):
        with pytest.raises(ModelError, match="MXFP4 needs blocks"):
            gguf_blocks(*wrong)
