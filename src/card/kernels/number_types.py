"""The types of numbers that weights are stored in, as NumPy knows them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Dtype = np.dtype[Any]
Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
_LINE = 64
_HUGE_PAGE = 2**21
_CACHED_BYTES = 2**19  # that the second look of two finds in the cache of one core

BFLOAT16: Dtype = np.dtype(ml_dtypes.bfloat16)
FLOAT16: Dtype = np.dtype(np.float16)
FLOAT32: Dtype = np.dtype(np.float32)
FLOAT64: Dtype = np.dtype(np.float64)
STORED_DTYPES: Mapping[str, Dtype] = {dtype.name: dtype for dtype in (FLOAT32, FLOAT16, BFLOAT16)}  # that passes read


def dtype_name(dtype: object) -> str:
    """Return the name of a type of numbers, whether it is NumPy's, torch's, or the name itself."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def has_nan(numbers: Array) -> bool:
    """Return whether an array holds NaN.

    The bits of NaN are beyond those of infinity, and whole numbers are compared without a copy: twice, the second time
    from the processor's cache.
    """
    if numbers.dtype.kind in "iub":
        return False
    num_bytes = numbers.itemsize
    infinity, sign = int(np.array(np.inf, numbers.dtype).view(f"u{num_bytes}")), 1 << 8 * num_bytes - 1
    flat, step = numbers.ravel(order="K"), _CACHED_BYTES // num_bytes
    for part in (flat[begin : begin + step] for begin in range(0, flat.size, step)):
        most, most_below_zero = (int(part.view(f"{kind}{num_bytes}").max()) for kind in "iu")
        if most > infinity or most_below_zero > infinity | sign:
            return True
    return False


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return an array with any numbers in it that begins where a line of the cache does, as wide loads want it.

    NumPy's own begin at multiples of 16 bytes, so that each load of 64 bytes would touch two lines.
    """
    return _in_line(np.empty, shape, np.dtype(dtype))


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return such an array of zeros; pages that nobody writes to take no memory."""
    return _in_line(np.zeros, shape, np.dtype(dtype))


def paged_zeros(num_elements: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Return a vector of zeros that takes memory page by page, as it is written to.

    NumPy asks for pages of 2 MB for its large arrays, so that a few numbers in each part of one take all of its memory.

    Raises: MemoryError if the system has no addresses for it.
    """
    element, num_bytes = np.dtype(dtype), num_elements * np.dtype(dtype).itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):  # only Linux has such pages
        return zeros(num_elements, element)
    try:
        room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes") from error
    room.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(room, element)


def _in_line(make: Callable[..., Any], shape: int | tuple[int, ...], dtype: Dtype) -> np.ndarray[Any, Any]:
    num_bytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
    raw: np.ndarray[Any, Any] = make(num_bytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
