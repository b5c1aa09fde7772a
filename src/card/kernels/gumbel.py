"""Gumbel noise of tokens, drawn by machine code where there is some."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from card.kernels.machine_code import has_machine_code, machine_code

_GROUP = 64  # tokens whose noise is drawn together
_WORD = 1 << 64


def draws_noise() -> bool:
    """Return whether there is machine code for it."""
    return _draw() is not None


def noise(seed: int, position: int, num_tokens: int) -> NDArray[np.float32]:
    """Return the noise of the first tokens at a position, within 1e-5 of what `card.tree.noise` defines: [num_tokens].

    Needs machine code.
    """
    return _noise_of_groups(seed, position, None, -(-num_tokens // _GROUP)).reshape(-1)[:num_tokens]


def noise_of(seed: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the noise of some tokens at a position, as `noise` does.

    Args:
        tokens: [N], in ascending order.
    """
    of_tokens = tokens // _GROUP
    is_first = np.ones(len(tokens), np.bool_)
    np.not_equal(of_tokens[1:], of_tokens[:-1], out=is_first[1:])
    groups, places = of_tokens[is_first], np.cumsum(is_first) - 1
    found: NDArray[np.float32] = _noise_of_groups(seed, position, groups, len(groups))[places, tokens % _GROUP]
    return found


def _noise_of_groups(seed: int, position: int, groups: NDArray[np.int64] | None, count: int) -> NDArray[np.float32]:
    """Return the noise of groups of tokens, of the first ones if none are named: [count, 64]."""
    out = np.empty((count, _GROUP), np.float32)
    named = 0 if groups is None else groups.ctypes.data
    _draw()(named, count, position, _signed(seed % _WORD), _signed(seed // _WORD % _WORD), out.ctypes.data)
    return out


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


@functools.cache
def _draw() -> Any:
    """Return the machine code; None if there is none."""
    return machine_code("gumbel").draw_noise if has_machine_code() else None
