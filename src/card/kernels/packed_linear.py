"""Linear layers as the machine code reads them: packed weights of any format, and products of rows with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from card.kernels.jit.tables import AS_BYTES, AS_FLOATS, LinearEntry
from card.kernels.machine_code import machine_code
from card.kernels.number_types import Array, Floats, zeros

PANEL, GROUP, LANES = 16, 64, 16  # output channels read together, activations that share a scale, floats of a vector


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer for the machine code; [out] is padded to whole panels, [in] to whole groups."""

    product: str  # one of the formats of `card.kernels.jit.formats`
    panels: npt.NDArray[np.uint8]  # [out / 16, bytes] as that format lays them out
    scales: Floats  # [out]
    bias: Floats  # [out]
    takes_floats: bool = False  # activations as they are, not as bytes

    @property
    def takes(self) -> int:
        """The activations it takes, as a table says it."""
        return AS_FLOATS if self.takes_floats else AS_BYTES

    @property
    def entry(self) -> npt.NDArray[np.int64]:
        """Its entry in a table of the machine code."""
        formats = machine_code("formats")
        expands_from, expander, expanded, expanded_bytes = formats.expanding(self.product) or (0, None, None, 0)
        return LinearEntry.pack(
            {
                "multiplier": formats.multiplier(self.product).address,
                "expands_from": expands_from,
                "expander": expander.address if expander else 0,
                "expanded": expanded.address if expanded else 0,
                "expanded_bytes": expanded_bytes,
                "panels": self.panels,
                "panel_bytes": self.panels.shape[1],
                "channel_scales": self.scales,
                "biases": self.bias,
                "takes": self.takes,
            }
        )


def padded(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple


def extended(values: Array | None, size: int) -> Floats:
    """Return values [n] as float32 with zeros behind them, [size]."""
    out = zeros(size)
    if values is not None:
        out[: len(values)] = values
    return out


def multiply_rows(x: Array, linear: PackedLinear, *, num_parts: int = 1, expands: bool = True) -> Floats:
    """Return x [T, in] times a linear layer as a pass computes it, [T, out].

    Args:
        num_parts: shares of output channels. They are computed one after another here; a pass gives each a thread.
        expands: for more rows than a tile has, weights may be expanded first.
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
    entry = linear.entry
    code.prepare_rows(
        linear.takes, filled.ctypes.data, 4 * GROUP * num_groups, num_rows, 0, 0, 0, num_groups, 0.0, *places, 0
    )
    most = machine_code("expanded_tiles").MOST_EXPANDED_BYTES
    room = np.empty(GROUP // PANEL * num_groups * most if expands else 0, np.uint8)
    out = np.empty((num_rows, PANEL * num_panels), np.float32)
    for part in range(num_parts):
        start, stop = num_panels * part // num_parts, num_panels * (part + 1) // num_parts
        code.project(
            entry.ctypes.data, num_rows, start, stop, *places, num_groups, out.ctypes.data, 4 * PANEL * num_panels, 0,
            room.ctypes.data if expands else 0,
        )  # fmt: skip
    return out
