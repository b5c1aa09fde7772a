"""Gumbel noise of tokens, drawn by machine code where there is some."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from card.kernels.machine_code import has_machine_code, machine_code

_WORD = 1 << 64  # numbers of 64 bits; a seed has two of them


def draws_noise() -> bool:
    """Return whether there is machine code for it."""
    return _code() is not None


def noise(seed: int, position: int, num_tokens: int) -> NDArray[np.float32]:
    """Return the noise of the first tokens at a position, within 1e-5 of what `card.tree.noise` defines: [num_tokens].

    Needs machine code.
    """
    return _noise_of_groups(seed, position, None, -(-num_tokens // _code().TOKENS)).reshape(-1)[:num_tokens]


def noise_of(seed: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the noise of some tokens at a position, as `noise` does.

    Args:
        tokens: [N], in ascending order.
    """
    size = _code().TOKENS
    of_tokens = tokens // size
    is_first = np.ones(len(tokens), np.bool_)
    np.not_equal(of_tokens[1:], of_tokens[:-1], out=is_first[1:])
    groups, places = of_tokens[is_first], np.cumsum(is_first) - 1
    noise: NDArray[np.float32] = _noise_of_groups(seed, position, groups, len(groups))[places, tokens % size]
    return noise


def _noise_of_groups(seed: int, position: int, groups: NDArray[np.int64] | None, count: int) -> NDArray[np.float32]:
    """Return the noise of groups of tokens, of the first ones if none are named: [count, tokens of a group]."""
    code = _code()
    out = np.empty((count, code.TOKENS), np.float32)
    named = 0 if groups is None else groups.ctypes.data
    code.draw_noise(named, count, position, _signed(seed % _WORD), _signed(seed // _WORD % _WORD), out.ctypes.data)
    return out


def _signed(word: int) -> int:
    """Return an unsigned number of 64 bits as the signed one of the same bits, which machine code takes."""
    return word - _WORD if word >= _WORD // 2 else word


@functools.cache
def _code() -> Any:
    """Return the machine code; None if there is none."""
    return machine_code("gumbel") if has_machine_code() else None
