"""Functions of integers and floats, compiled once for a machine by what their annotations say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types

from card.models.jit.vectors import floats

_KINDS = {"int": types.int64, "float": types.float32, "Floats": floats, "None": types.void}
F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile a function now, or take what an earlier process compiled; it runs without Python's lock.

    Its module must defer annotations, and each must be one of `_KINDS`. What it calls must be compiled above it.
    """
    *arguments, result = (_KINDS[name] for name in function.__annotations__.values())
    made: Any = njit(result(*arguments), nogil=True, cache=True)(function)
    return cast(F, made)
