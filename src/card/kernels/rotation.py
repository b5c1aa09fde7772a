"""Cosines and sines of rotary embeddings, with the same bits on every computer.

The mathematical libraries below Python and torch differ in the last bit from one processor to the next. Here a power is
made of decimal numbers, which no processor computes by itself, and a sine of additions and multiplications of 64 bits,
which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_Reals = npt.NDArray[np.float64]

LEAST_SETTING = 1e-6  # a base or a factor: with less, angles turn more often than whole numbers of 64 bits can count
_DIGITS = 30  # of a power: twice those of a float64
_PI = Decimal("3.14159265358979323846264338327950288")
PROPORTIONAL = "proportional"  # angles of a part of each head's pairs, at the pace that they have in the whole head
WITH_ALPHA = "dynamic"  # what configs call a base times a power of a fixed factor, as Hunyuan has it
_LEAST_WIDTH = 0.001  # of yarn's channels between those that slow down and those that do not, as transformers has it
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


def inverse_frequencies(
    rope: Mapping[str, Any], size: int, num_positions: int, *, is_long: bool = False
) -> Floats | None:
    """Return by how much each pair of a head turns from one position to the next, [size / 2].

    Args:
        rope: a config's ``rope_parameters``, of the type default, linear, llama3, yarn, longrope or proportional,
                or dynamic with an alpha.
        size: number of a head's channels that turn.
        num_positions: the most that the model has.
        is_long: of texts beyond the context of the first training, where longrope has other factors.
    Returns: None for another type, or a base of 0 or less.
    """
    kind = rope["rope_type"]
    is_known = kind in (*_SCALED, "longrope") and (kind != WITH_ALPHA or rope.get("alpha"))
    if not is_known or not rope["rope_theta"] > 0:
        return None
    plain = _plain_frequencies(rope["rope_theta"], size, rope["alpha"] if kind == WITH_ALPHA else 1)
    if kind == "longrope":
        factors = np.array(rope["long_factor" if is_long else "short_factor"], np.float32)
        return (plain / factors).astype(np.float32)
    return _SCALED[kind](plain, rope, num_positions).astype(np.float32)


def attention_factor(rope: Mapping[str, Any], num_positions: int) -> float:
    """Return what cosines and sines are multiplied by. Arguments as of `inverse_frequencies`."""
    if rope["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if (stated := rope.get("attention_factor")) is not None:
        return float(stated)
    if rope["rope_type"] == "longrope":
        return _long_growth(_factor(rope, num_positions), rope["original_max_position_embeddings"])
    factor, scale, divisor = _factor(rope, num_positions), rope.get("mscale"), rope.get("mscale_all_dim")
    return _growth(factor, scale) / _growth(factor, divisor) if scale and divisor else _growth(factor, 1.0)


def query_growth(rope: Mapping[str, Any], rate: float, num_positions: int) -> Floats:
    """Return what queries are multiplied by at each position: they grow with every context of the first training.

    Args:
        rate: growth from one context to e times as many.
    Source: Llama 4's temperature of attention, as transformers has it.
    """
    length = int(rope["original_max_position_embeddings"])
    contexts = range(1, -(-num_positions // length) + 1)
    factors = np.array([1 + rate * float(_logarithm(context)) for context in contexts], np.float32)
    return np.repeat(factors, length)[:num_positions]


def _growth(factor: float, scale: float) -> float:
    """Return by how much yarn lets queries and keys grow in a context that is ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * float(_logarithm(factor)) + 1.0


def _long_growth(factor: float, context: int) -> float:
    """Return the same of longrope (Ding et al. 2024, arXiv:2402.13753), with the length of the first context."""
    if factor <= 1:
        return 1.0
    with localcontext() as decimals:
        decimals.prec = _DIGITS
        return float((1 + _logarithm(factor) / _logarithm(context)).sqrt())


def _factor(rope: Mapping[str, Any], num_positions: int) -> float:
    """Return how many times as long the context is; some configs state both lengths instead."""
    stated = rope.get("factor")
    return float(num_positions / rope["original_max_position_embeddings"] if stated is None else stated)


def _logarithm(value: float | Decimal) -> Decimal:
    with localcontext() as context:
        context.prec = _DIGITS
        return Decimal(value).ln()


def _plain_frequencies(theta: float, size: int, alpha: float = 1) -> _Reals:
    with localcontext() as context:
        context.prec = _DIGITS
        base = Decimal(theta) if alpha == 1 else Decimal(theta) * Decimal(alpha) ** (Decimal(size) / Decimal(size - 2))
        return np.array([float(base ** (Decimal(-channel) / Decimal(size))) for channel in range(0, size, 2)])


def _llama3_frequencies(plain: _Reals, rope: Mapping[str, Any], _: int) -> _Reals:
    """Slow the long waves down by a factor, the short ones not at all, and those between in part (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = rope["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the context of the first training
    return _mixed(plain, rope["factor"], np.clip((waves - low) / (high - low), 0.0, 1.0))


def _yarn_frequencies(plain: _Reals, rope: Mapping[str, Any], num_positions: int) -> _Reals:
    """Slow down by a factor what turns once or less in the first context, and leave what turns 32 times or more.

    Source: Peng et al. 2023, arXiv:2309.00071; the numbers of turns are those that a config states.
    """
    num_pairs = len(plain)
    first, last = (_channel(rope, *turns, num_pairs) for turns in (("beta_fast", 32), ("beta_slow", 1)))
    if rope.get("truncate", True):
        first, last = Decimal(math.floor(first)), Decimal(math.ceil(last))
    low, high = max(float(first), 0.0), min(float(last), 2.0 * num_pairs - 1.0)
    width = high - low or _LEAST_WIDTH
    slowed = np.clip((np.arange(num_pairs) - low) / width, 0.0, 1.0)
    return _mixed(plain, _factor(rope, num_positions), 1.0 - slowed)


def _channel(rope: Mapping[str, Any], name: str, default: float, num_pairs: int) -> Decimal:
    """Return which pair of channels turns a stated number of times in the context of the first training."""
    turns = rope.get(name) or default
    with localcontext() as context:
        context.prec = _DIGITS
        once = Decimal(rope["original_max_position_embeddings"]) / (Decimal(turns) * 2 * _PI)
        return num_pairs * _logarithm(once) / _logarithm(rope["rope_theta"])


def _mixed(plain: _Reals, factor: float, kept: _Reals) -> _Reals:
    mixed: _Reals = (1.0 - kept) * plain / factor + kept * plain
    return mixed


def _proportional_frequencies(plain: _Reals, rope: Mapping[str, Any], _: int) -> _Reals:
    """Let a share of the pairs turn, the fast ones, and the others not at all (Gemma 4)."""
    num_turning = int(rope.get("partial_rotary_factor", 1.0) * 2 * len(plain) // 2)
    return np.where(np.arange(len(plain)) < num_turning, plain, 0.0) / float(rope.get("factor", 1.0))


_SCALED: Mapping[str, Callable[[_Reals, Mapping[str, Any], int], _Reals]] = {
    "default": lambda plain, rope, _: plain,
    WITH_ALPHA: lambda plain, rope, _: plain,
    "linear": lambda plain, rope, _: plain / float(rope["factor"]),
    "llama3": _llama3_frequencies,
    "yarn": _yarn_frequencies,
    PROPORTIONAL: _proportional_frequencies,
}


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
