"""Linear layers of GGUF's quantised blocks, packed for the machine code without rounding anything again."""

from __future__ import annotations

import numpy as np

from card.kernels.formats.block_format import BlockFormat, Bytes
from card.kernels.number_types import Array, zeros
from card.kernels.packed_linear import PANEL, PackedLinear, extended, padded


def pack_blocks(raw: Bytes, form: BlockFormat) -> Bytes:
    """Return quantised rows [out, bytes] as panels; those of rows from a multiple of 16 on are a part of all.

    Raises: as `BlockFormat.pack`.
    """
    num_in = raw.shape[1] // form.num_bytes * form.inputs
    panels = zeros((-(-len(raw) // PANEL), form.panel_bytes(num_in)), np.uint8)
    form.pack(raw, panels)
    return panels


def block_linear(
    panels: Bytes,
    form: BlockFormat,
    num_out: int,
    *,
    factor: float = 1.0,
    bias: Array | None = None,
    out_multiple: int = PANEL,
) -> PackedLinear:
    """Return a layer of packed blocks.

    Args:
        factor: what its products are times.
        bias: [out], already times the factor.
        out_multiple: what the number of output channels is filled up to.
    """
    size, packed = padded(num_out, out_multiple), panels
    if more := size // PANEL - len(packed):
        packed = zeros((len(panels) + more, panels.shape[1]), np.uint8)
        packed[: len(panels)] = panels
    return PackedLinear(form.product, packed, np.full(size, factor, np.float32), extended(bias, size))
