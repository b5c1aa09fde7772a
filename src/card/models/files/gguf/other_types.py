"""Types of ggml that neither passes nor numpy know: read with the package gguf, which is slow to import."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from card.kernels.number_types import Array


def type_name(type_id: int) -> str:
    """Return ggml's name of a type."""
    from gguf import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"type {type_id}"


@functools.cache
def block_sizes(type_id: int) -> tuple[int, int] | None:
    """Return the elements and the bytes of a block; None if the type cannot be read."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        can_be_read = unpacked(np.zeros((1, num_bytes), np.uint8), type_id).dtype == np.float32
    except (NotImplementedError, ValueError, TypeError):
        return None
    return (elements, num_bytes) if can_be_read else None


def unpacked(raw: np.ndarray[Any, np.dtype[np.uint8]], type_id: int) -> Array:
    """Return the numbers that rows of blocks [n, bytes] stand for, float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Array = dequantize(raw, GGMLQuantizationType(type_id))
    return values
