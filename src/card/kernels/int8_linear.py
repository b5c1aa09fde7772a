"""Linear layers in 8-bit integers: packed weights, exact products, and whether this machine can make them.

The machine code (`card.kernels.jit`) is made by LLVM at its first use.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from card.kernels.number_types import BFLOAT16, zeros
from card.machine.processor import INTEGER_PROCESSORS, kernel_kind

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

PANEL, GROUP, LANES = 16, 64, 16  # output channels read together, activations that share a scale, floats of a vector
_ZERO = 128  # weights are unsigned bytes around this
_LARGEST = 127.0
_PROBED_ROWS = (1, 2, 16, 33)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer for the machine code; [out] is padded to whole panels, [in] to whole groups."""

    product: str  # one of the formats of `card.kernels.jit.formats`
    panels: npt.NDArray[np.uint8]  # [out / 16, bytes] as that format lays them out
    scales: Floats  # [out]
    bias: Floats  # [out]
    takes_floats: bool = False  # activations as they are, not as bytes

    @property
    def entry(self) -> tuple[int, ...]:
        """Its entry in a table of the machine code."""
        multiplier = machine_code("formats").multiplier(self.product).address
        panels, scales, bias = (array.ctypes.data for array in (self.panels, self.scales, self.bias))
        tables = machine_code("tables")
        takes = tables.AS_FLOATS if self.takes_floats else tables.AS_BYTES
        return multiplier, panels, self.panels.shape[1], scales, bias, takes


def padded(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple


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


def extended(values: Array | None, size: int) -> Floats:
    """Return values [n] as float32 with zeros behind them, [size]."""
    out = zeros(size)
    if values is not None:
        out[: len(values)] = values
    return out


def multiply_rows(x: Array, linear: PackedLinear, *, num_parts: int = 1) -> Floats:
    """Return x [T, in] times a linear layer as a pass computes it, [T, out].

    Args:
        num_parts: shares of output channels that are computed one after the other, as threads would at once.
    """
    code, sums_size = machine_code("rows"), machine_code("vectors").SUMS_BYTES // 4
    (num_rows, num_in), num_panels = x.shape, len(linear.panels)
    num_groups = padded(num_in, GROUP) // GROUP
    filled = zeros((num_rows, num_groups * GROUP))
    filled[:, :num_in] = x
    numbers = np.empty((num_rows, num_groups * GROUP), np.int8)
    scales = np.empty((num_rows, num_groups), np.float32)
    sums = np.empty((num_rows, num_groups, sums_size + GROUP), np.int32)  # and the rows behind them
    places = (numbers.ctypes.data, scales.ctypes.data, sums.ctypes.data)
    entry = np.array(linear.entry, np.int64)
    code.prepare_rows(
        entry[-1], filled.ctypes.data, 4 * GROUP * num_groups, num_rows, 0, 0, 0, num_groups, 0.0, *places, 0
    )
    out = np.empty((num_rows, PANEL * num_panels), np.float32)
    for part in range(num_parts):
        start, stop = num_panels * part // num_parts, num_panels * (part + 1) // num_parts
        code.project(
            entry.ctypes.data, num_rows, start, stop, *places, num_groups, out.ctypes.data, 4 * PANEL * num_panels, 0
        )
    return out


@functools.cache
def machine_code(module: str) -> Any:
    """Return a module of `card.kernels.jit`: compiled at its first use on a machine, and kept for later ones."""
    return import_module(f"card.kernels.jit.{module}")


def has_machine_code() -> bool:
    """Return whether this process can make machine code."""
    return find_spec("llvmlite") is not None and kernel_kind() is not None


def kernels_identity() -> str:
    """Return what tells the machine code of this process from other kinds of it, and from that of other sources.

    Returns: empty where there is none, so that torch multiplies.
    """
    return str(machine_code("object_code").kept_name()) if has_machine_code() else ""


@functools.cache
def why_not_int8() -> str | None:
    """Return why integer passes are not possible on this machine, or not exact; None if they are."""
    if find_spec("llvmlite") is None:
        return "the package llvmlite is missing; run pip install llvmlite"
    if kernel_kind() is None:
        return f"it needs {INTEGER_PROCESSORS}"
    random = np.random.default_rng(0)
    weight, x = (
        random.integers(-127, 128, (size, 256)).astype(np.float32) for size in (96, max(_PROBED_ROWS))
    )
    weight[:, 0] = x[:, ::GROUP] = _LARGEST  # all scales are 1, so the product is one of whole numbers
    linear = quantize_linear(weight, None)
    for num_rows in _PROBED_ROWS:
        for num_parts in (1, 2):
            if not np.array_equal(multiply_rows(x[:num_rows], linear, num_parts=num_parts), x[:num_rows] @ weight.T):
                return f"integer products of {num_rows} rows in {num_parts} parts are not exact here"
    return None
