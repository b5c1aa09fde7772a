"""Formats of weights by name, and the code that multiplies by each: written and compiled when it is first asked for."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from card.kernels.formats import find_product
from card.kernels.jit import byte_tiles, float_tiles
from card.kernels.jit.block_tiles import format_of
from card.kernels.jit.expanded_tiles import expanded_bytes, expanded_multiplier_of, expander_of, expands_from
from card.kernels.jit.object_code import ObjectCode, is_made_elsewhere
from card.kernels.jit.tiles import Format, multiplier_of

_FORMATS = {"byte": byte_tiles.FORMAT, **float_tiles.FORMATS}


@functools.cache
def multiplier(name: str) -> ObjectCode:
    """Return the code that multiplies by weights of a format, for this process."""
    form: Format = _FORMATS[name] if name in _FORMATS else format_of(find_product(name).shape)
    return multiplier_of(name, form)


@functools.cache
def expanding(name: str) -> tuple[int, ObjectCode, ObjectCode, int] | None:
    """Return how panels of a format are expanded: from how many rows on, by what, what multiplies, bytes of a group.

    Returns: None for formats that are multiplied as they are stored.
    """
    if name in _FORMATS or not (size := expanded_bytes(shape := find_product(name).shape)):
        return None
    return expands_from(shape), expander_of(name, shape), expanded_multiplier_of(name, shape), size


def prepare(names: Iterable[str]) -> None:
    """Have the code of formats ready, except code that another process is compiling: a call waits for that.

    A target's process and its drafter's so share out what both need.
    """
    for name in names:
        if not is_made_elsewhere(name):
            multiplier(name)
