"""Cosines and sines of rotary embeddings, with the same bits on every computer.

The mathematical libraries below Python and torch differ in the last bit from one processor to the next. Here a power is
made of decimal numbers, which no processor computes by itself, and a sine of additions and multiplications of 64 bits,
which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_Reals = npt.NDArray[np.float64]

_DIGITS = 30  # of a power: twice those of a float64
_BLOCK = 128  # positions computed at once: what lies between stays in a core's cache
_TWO_OVER_PI = 6.36619772367581382433e-01
# pi / 2 in parts of 33 bits, so that their products with whole numbers below 2^20 are exact (fdlibm, e_rem_pio2.c).
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
# Polynomials of fdlibm's k_sin.c and k_cos.c, for angles up to pi / 4; the highest power first.
_SINE = (
    1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
    8.33333333332248946124e-03, -1.66666666666666324348e-01,
)  # fmt: skip
_COSINE = (
    -1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
    -1.38888888888741095749e-03, 4.16666666666666019037e-02,
)  # fmt: skip


def inverse_frequencies(rope: Mapping[str, Any], size: int) -> Floats | None:
    """Return by how much each pair of a head turns from one position to the next, [size / 2].

    Args:
        rope: a config's ``rope_parameters``, of the type default, linear or llama3.
        size: number of a head's channels that turn.
    Returns: None for another type, or a base of 0 or less.
    """
    if not rope["rope_theta"] > 0:
        return None
    plain = _plain_frequencies(rope["rope_theta"], size)
    if rope["rope_type"] == "default":
        return plain.astype(np.float32)
    if rope["rope_type"] == "linear":
        return (plain / float(rope["factor"])).astype(np.float32)
    if rope["rope_type"] == "llama3":
        return _llama3_frequencies(plain, rope).astype(np.float32)
    return None


def _plain_frequencies(theta: float, size: int) -> _Reals:
    with localcontext() as context:
        context.prec = _DIGITS
        base = Decimal(theta)
        return np.array([float(base ** (Decimal(-channel) / Decimal(size))) for channel in range(0, size, 2)])


def _llama3_frequencies(plain: _Reals, rope: Mapping[str, Any]) -> _Reals:
    """Slow the long waves down by a factor, the short ones not at all, and those between in part (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = rope["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the context of the first training
    kept = np.clip((waves - low) / (high - low), 0.0, 1.0)
    mixed: _Reals = (1.0 - kept) * plain / rope["factor"] + kept * plain
    return mixed


def rotation_tables(frequencies: Floats, num_positions: int, scale: float = 1.0) -> tuple[Floats, Floats]:
    """Return cosines and sines of the angles of all positions, times ``scale``, [num_positions, D / 2] each."""
    tables = np.empty((2, num_positions, len(frequencies)), np.float32)
    for first in range(0, num_positions, _BLOCK):
        positions = np.arange(first, min(first + _BLOCK, num_positions), dtype=np.float32)
        angles = positions[:, None] * frequencies  # in 32 bits, as models were trained
        for table, values in zip(tables, _cos_and_sin(angles.astype(np.float64)), strict=True):
            table[first : first + _BLOCK] = values * scale
    return tables[0], tables[1]


def _cos_and_sin(x: _Reals) -> tuple[_Reals, _Reals]:
    """Return cosines and sines of angles from 0 to 2^20."""
    quarters = np.rint(x * _TWO_OVER_PI)
    for part in _HALF_PI:
        x = x - quarters * part
    square = x * x
    sin = x + x * square * _polynomial(_SINE, square)
    cos = 1.0 - (0.5 * square - square * square * _polynomial(_COSINE, square))
    quadrant = quarters.astype(np.int64) % 4
    swaps = quadrant % 2 == 1
    return (
        np.where(swaps, sin, cos) * np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0),
        np.where(swaps, cos, sin) * np.where(quadrant >= 2, -1.0, 1.0),
    )


def _polynomial(factors: tuple[float, ...], x: _Reals) -> _Reals:
    y = np.full_like(x, factors[0])
    for factor in factors[1:]:
        y = y * x + factor
    return y
