"""The types of numbers that weights are stored in, as NumPy knows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Dtype = np.dtype[Any]
Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
_LINE = 64

BFLOAT16: Dtype = np.dtype(ml_dtypes.bfloat16)
FLOAT16: Dtype = np.dtype(np.float16)
FLOAT32: Dtype = np.dtype(np.float32)
FLOAT64: Dtype = np.dtype(np.float64)
STORED_DTYPES: Mapping[str, Dtype] = {dtype.name: dtype for dtype in (FLOAT32, FLOAT16, BFLOAT16)}  # that passes read


def dtype_name(dtype: object) -> str:
    """Return the name of a type of numbers, whether it is NumPy's, torch's, or the name itself."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return an array with any numbers in it that begins where a line of the cache does, as wide loads want it.

    NumPy's own begin at multiples of 16 bytes, so that each load of 64 bytes would touch two lines.
    """
    return _in_line(np.empty, shape, np.dtype(dtype))


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return such an array of zeros; pages that nobody writes to take no memory."""
    return _in_line(np.zeros, shape, np.dtype(dtype))


def _in_line(make: Callable[..., Any], shape: int | tuple[int, ...], dtype: Dtype) -> np.ndarray[Any, Any]:
    num_bytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
    raw: np.ndarray[Any, Any] = make(num_bytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
