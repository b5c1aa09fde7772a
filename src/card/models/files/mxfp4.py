"""Weights of safetensors files in MXFP4: their blocks in the order of GGUF's, bit for bit."""

from __future__ import annotations

import numpy as np

from card.errors import ModelError
from card.kernels.formats.block_format import Bytes

_HALF = 8  # bytes whose numbers are lower halves in a block of GGUF
_LOW, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)


def gguf_blocks(blocks: Bytes, scales: Bytes) -> Bytes:
    """Return blocks of GGUF's MXFP4, [..., 17 N] uint8: an exponent, then bytes of numbers j and j + 16.

    Args:
        blocks: [..., N, 16] uint8, as tensors that are named ``*_blocks``; byte j holds the numbers 2j and 2j + 1.
        scales: [..., N] uint8, as those named ``*_scales``: exponents, with 127 for 1.

    Raises: ModelError if the shapes or dtypes are others.
    Source: https://github.com/ggml-org/llama.cpp/blob/master/conversion/gpt_oss.py
    """
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8 or blocks.shape != (*scales.shape, 2 * _HALF):
        raise ModelError(
            f"MXFP4 needs blocks [..., 16] and scales [...] of uint8, got {blocks.dtype} {list(blocks.shape)} and "
            f"{scales.dtype} {list(scales.shape)}; download the model again"
        )
    words = np.ascontiguousarray(blocks).view(np.uint64)  # eight bytes at once
    lower, upper = words[..., 0], words[..., 1]
    out = np.empty((*scales.shape, 1 + 2 * _HALF), np.uint8)
    out[..., 0] = scales
    out[..., 1::2] = (lower & _LOW | (upper & _LOW) << _FOUR)[..., None].view(np.uint8)
    out[..., 2::2] = (lower >> _FOUR & _LOW | upper & ~_LOW)[..., None].view(np.uint8)
    return out.reshape(*scales.shape[:-1], -1)
