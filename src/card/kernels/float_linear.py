"""Linear layers with weights of 16 or 32 bits as they are stored, packed for the machine code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from card.kernels.number_types import BFLOAT16, FLOAT16, FLOAT32, Array, Dtype, zeros
from card.kernels.packed_linear import GROUP, PANEL, PackedLinear, extended, padded

FLOAT_PRODUCTS: Mapping[Dtype, str] = {BFLOAT16: "bf16", FLOAT16: "f16", FLOAT32: "f32"}


def float_linear(weight: Array, bias: Array | None, *, factor: float = 1.0, out_multiple: int = PANEL) -> PackedLinear:
    """Return a layer [out, in] whose weights keep their bits.

    Args:
        weight: of one of the dtypes of `FLOAT_PRODUCTS`.
        factor: what its products are times; they are multiplied when they have been added up.
        bias: [out], already times the factor.
        out_multiple: what the number of output channels is filled up to.
    """
    num_out, num_in = weight.shape
    size_out, size_in = padded(num_out, out_multiple), padded(num_in, GROUP)
    panels = zeros((size_out // PANEL, size_in, PANEL), weight.dtype)
    whole = num_out // PANEL
    panels[:whole, :num_in] = weight[: whole * PANEL].reshape(whole, PANEL, num_in).transpose(0, 2, 1)
    if num_out % PANEL:
        panels[whole, :num_in, : num_out % PANEL] = weight[whole * PANEL :].T
    as_bytes = panels.reshape(len(panels), -1).view(np.uint8)
    scales = np.full(size_out, factor, np.float32)
    return PackedLinear(FLOAT_PRODUCTS[weight.dtype], as_bytes, scales, extended(bias, size_out), takes_floats=True)
