"""Formats of weights by name, and the code that multiplies by each: written and compiled when it is first asked for."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from card.kernels.jit import byte_tiles, float_tiles
from card.kernels.jit.block_tiles import BlockShape, format_of
from card.kernels.jit.object_code import ObjectCode, is_made_elsewhere
from card.kernels.jit.tiles import Format, multiplier_of

SHAPES = {  # of GGUF's blocks
    "q4_0": BlockShape(part=32, bits=4, zero=8, scale="half"),
    "q4_1": BlockShape(part=32, bits=4, scale="half", has_minimum=True),
    "q4_k": BlockShape(part=32, bits=4, scale="byte", has_minimum=True),
    "q5_0": BlockShape(part=32, bits=5, zero=16, scale="half"),
    "q5_1": BlockShape(part=32, bits=5, scale="half", has_minimum=True),
    "q5_k": BlockShape(part=32, bits=5, scale="byte", has_minimum=True),
    "q6_k": BlockShape(part=16, bits=6, zero=32, scale="signed byte"),
    "q8_0": BlockShape(part=32, bits=8, zero=128, scale="half"),
}
_FORMATS = {"byte": byte_tiles.FORMAT, **float_tiles.FORMATS}


@functools.cache
def multiplier(name: str) -> ObjectCode:
    """Return the code that multiplies by weights of a format, for this process."""
    form: Format = _FORMATS[name] if name in _FORMATS else format_of(SHAPES[name])
    return multiplier_of(name, form)


def prepare(names: Iterable[str]) -> None:
    """Have the code of formats ready, except code that another process is compiling: a call waits for that.

    A target's process and its drafter's so share out what both need.
    """
    for name in names:
        if not is_made_elsewhere(name):
            multiplier(name)
