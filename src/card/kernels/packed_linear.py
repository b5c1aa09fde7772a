"""Linear layers as the machine code reads them: packed weights of any format, and products of rows with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from card.kernels.machine_code import machine_code

PANEL, GROUP, LANES = 16, 64, 16  # output channels read together, activations that share a scale, floats of a vector


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer for the machine code; [out] is padded to whole panels, [in] to whole groups."""

    product: str  # one of the formats of `card.kernels.jit.formats`
    panels: Tensor  # [out / 16, bytes] as that format lays them out
    scales: Tensor  # [out] float32
    bias: Tensor  # [out] float32
    takes_floats: bool = False  # activations as they are, not as bytes

    @property
    def entry(self) -> tuple[int, ...]:
        """Its entry in a table of the machine code."""
        multiplier = machine_code("formats").multiplier(self.product).address
        panels, scales, bias = (tensor.data_ptr() for tensor in (self.panels, self.scales, self.bias))
        tables = machine_code("tables")
        takes = tables.AS_FLOATS if self.takes_floats else tables.AS_BYTES
        return multiplier, panels, self.panels.shape[1], scales, bias, takes


def padded(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple


def extended(values: Tensor | None, size: int) -> Tensor:
    """Return values [n] as float32 with zeros behind them, [size]."""
    out = torch.zeros(size)
    if values is not None:
        out[: len(values)] = values
    return out


def multiply_rows(x: Tensor, linear: PackedLinear, *, num_parts: int = 1) -> Tensor:
    """Return x [T, in] times a linear layer as a pass computes it, [T, out].

    Args:
        num_parts: shares of output channels. They are computed one after another here; a pass gives each a thread.
    """
    code, sums_size = machine_code("rows"), machine_code("vectors").SUMS_BYTES // 4
    num_rows, num_in, num_panels = *x.shape, len(linear.panels)
    num_groups = padded(num_in, GROUP) // GROUP
    filled = nn.functional.pad(x.float(), (0, num_groups * GROUP - num_in))
    numbers = torch.empty((num_rows, num_groups * GROUP), dtype=torch.int8)
    scales = torch.empty((num_rows, num_groups))
    sums = torch.empty((num_rows, num_groups, sums_size + GROUP), dtype=torch.int32)  # and the rows behind them
    places = (numbers.data_ptr(), scales.data_ptr(), sums.data_ptr())
    entry = np.array(linear.entry, np.int64)
    code.prepare_rows(
        entry[-1], filled.data_ptr(), 4 * GROUP * num_groups, num_rows, 0, 0, 0, num_groups, 0.0, *places, 0
    )
    out = torch.empty((num_rows, PANEL * num_panels))
    for part in range(num_parts):
        start, stop = num_panels * part // num_parts, num_panels * (part + 1) // num_parts
        code.project(
            entry.ctypes.data, num_rows, start, stop, *places, num_groups, out.data_ptr(), 4 * PANEL * num_panels, 0
        )
    return out
