"""Sizes of the layers of trained heads, and the scale of what they read: the same in training and where they draft."""

from __future__ import annotations

import numpy as np

from card.config.fields import require
from card.kernels.number_types import Array, Floats
from card.models.own.exact_layers import rms_norm

EPS = 1e-6  # of norms
ROTARY_BASE = 10_000.0
_HEAD_SIZE = 64  # or the whole width, if that is below


def heads_of(width: int) -> int:
    """Return the number of heads of a layer."""
    return max(1, width // _HEAD_SIZE)


def require_width(width: int) -> None:
    """Check the width of a layer: its heads are of one even size. Raises: SettingsError."""
    is_right = width % _HEAD_SIZE == 0 or (4 <= width < _HEAD_SIZE and width % 4 == 0)
    require(is_right, "width", f"a multiple of {_HEAD_SIZE}, or of 4 below", width)


def layer_shapes(width: int, layer: str = "layer") -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a layer by its name, which begins with that of the layer."""
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("query", "key", "value", "out"), (width, width)),
        **dict.fromkeys(("gate", "up"), (2 * width, width)),
        "down": (width, 2 * width),
        **dict.fromkeys(("norm", "mlp_norm"), (width,)),
    }
    return {f"{layer}.{name}.weight": shape for name, shape in shapes.items()}


def scaled_rows(rows: Array) -> Floats:
    """Return rows [..., D] with a mean square of 1, float32."""
    return rms_norm(rows.astype(np.float32), np.ones(rows.shape[-1], np.float32), EPS)
