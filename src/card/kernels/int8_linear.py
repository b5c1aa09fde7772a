"""Linear layers in 8-bit integers: how weights are rounded, and whether this machine multiplies them exactly."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from card.kernels.machine_code import machine_code
from card.kernels.packed_linear import GROUP, LANES, PANEL, PackedLinear, extended, multiply_rows, padded
from card.machine.processor import INTEGER_PROCESSORS, kernel_kind

_ZERO = 128  # weights are unsigned bytes around this
_LARGEST = 127.0
_PROBED_ROWS = (1, 2, 16, 33)


def quantize_linear(weight: Tensor, bias: Tensor | None, *, out_multiple: int = PANEL) -> PackedLinear:
    """Return a layer [out, in] as packed integers with a scale for each output channel."""
    num_out = len(weight)
    if weight.dtype != torch.bfloat16:
        weight = weight.float()
    if weight.shape[1] % LANES:
        weight = nn.functional.pad(weight, (0, -weight.shape[1] % LANES))
    weight = weight.contiguous()
    size_out, size_in = padded(num_out, out_multiple), padded(weight.shape[1], GROUP)
    panels = torch.full((size_out // PANEL, PANEL * size_in), _ZERO, dtype=torch.uint8)
    scales = torch.zeros(size_out)
    is_bfloat16 = int(weight.dtype == torch.bfloat16)
    machine_code("rows").pack(
        weight.data_ptr(), is_bfloat16, *weight.shape, panels.data_ptr(), panels.shape[1], scales.data_ptr()
    )
    return PackedLinear("byte", panels, scales, extended(bias, size_out))


@functools.cache
def why_not_int8() -> str | None:
    """Return why integer passes are not possible on this machine, or not exact; None if they are."""
    if find_spec("llvmlite") is None:
        return "the package llvmlite is missing; run pip install llvmlite"
    if kernel_kind() is None:
        return f"it needs {INTEGER_PROCESSORS}"
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randint(-127, 128, (size, 256), generator=generator).float() for size in (96, max(_PROBED_ROWS)))
    weight[:, 0] = x[:, ::GROUP] = _LARGEST  # all scales are 1, so the product is one of whole numbers
    linear = quantize_linear(weight, None)
    for num_rows in _PROBED_ROWS:
        for num_parts in (1, 2):
            if not torch.equal(multiply_rows(x[:num_rows], linear, num_parts=num_parts), x[:num_rows] @ weight.T):
                return f"integer products of {num_rows} rows in {num_parts} parts are not exact here"
    return None
