"""Linear layers in 8-bit integers: how weights are rounded, and whether this machine multiplies them exactly."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import numpy as np

from card.kernels.machine_code import machine_code
from card.kernels.number_types import BFLOAT16, Array, Floats, zeros
from card.kernels.packed_linear import GROUP, LANES, PANEL, PackedLinear, extended, multiply_rows, padded
from card.machine.processor import INTEGER_PROCESSORS, kernel_kind

_ZERO = 128  # weights are unsigned bytes around this
_LARGEST = 127.0
_PROBED_ROWS = (1, 2, 16, 33)


def quantize_linear(weight: Array, bias: Array | None, *, out_multiple: int = PANEL) -> PackedLinear:
    """Return a layer [out, in] as packed integers with a scale for each output channel."""
    num_out = len(weight)
    if weight.dtype != BFLOAT16:
        weight = weight.astype(np.float32, copy=False)
    if weight.shape[1] % LANES:
        weight = np.pad(weight, ((0, 0), (0, -weight.shape[1] % LANES)))
    weight = np.ascontiguousarray(weight)
    size_out, size_in = padded(num_out, out_multiple), padded(weight.shape[1], GROUP)
    panels = zeros((size_out // PANEL, PANEL * size_in), np.uint8)
    panels[...] = _ZERO
    scales = zeros(size_out)
    is_bfloat16 = int(weight.dtype == BFLOAT16)
    machine_code("rows").pack(
        weight.ctypes.data, is_bfloat16, *weight.shape, panels.ctypes.data, panels.shape[1], scales.ctypes.data
    )
    return PackedLinear("byte", panels, scales, extended(bias, size_out))


@functools.cache
def why_not_int8() -> str | None:
    """Return why integer passes are not possible on this machine, or not exact; None if they are."""
    if find_spec("llvmlite") is None:
        return "the package llvmlite is missing; run pip install llvmlite"
    if kernel_kind() is None:
        return f"it needs {INTEGER_PROCESSORS}"
    weight, x = _probed(96), _probed(max(_PROBED_ROWS))
    weight[:, 0] = x[:, ::GROUP] = _LARGEST  # all scales are 1, so the product is one of whole numbers
    linear = quantize_linear(weight, None)
    for num_rows in _PROBED_ROWS:
        for num_parts in (1, 2):
            if not np.array_equal(multiply_rows(x[:num_rows], linear, num_parts=num_parts), x[:num_rows] @ weight.T):
                return f"integer products of {num_rows} rows in {num_parts} parts are not exact here"
    return None


def _probed(num_rows: int) -> Floats:
    """Return whole numbers from -127 to 127, [rows, 256], without order: importing numpy's random ones takes longer."""
    numbers: Array = (np.arange(256 * num_rows, dtype=np.uint32) + 1) * np.uint32(2654435761)
    numbers = (numbers ^ numbers >> 15) * np.uint32(2246822519)
    return (numbers % 255).astype(np.float32).reshape(num_rows, 256) - np.float32(_LARGEST)
