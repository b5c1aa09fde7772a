"""The shape of a JSON text before it is decoded: how many objects it would make, and how deep they nest.

A decoded object takes many times the bytes of its text: `{},` is 3 bytes and becomes 72. So a body with far more
objects than any request needs is refused undecoded. Lists of whole numbers or texts have no bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

MAX_CONTAINERS = 100_000  # objects and lists of one body; 2,000 messages with calls and parts have 20,000
MAX_MEMBERS = 200_000  # names with their values
MAX_DECIMALS = 10_000  # numbers with a fraction or an exponent: the worst take 9 microseconds each to decode
MAX_DEPTH = 128
MAX_DIGITS = 400  # of one number in a row; the time for a whole number grows with their square
_PIECE_BYTES = 64 * 1024  # scanned without a pause for other threads
_DECIMAL = re.compile(rb"[0-9][.eE]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS = bytes(ord("0") if one in b"0123456789" else ord(" ") for one in range(256))
_STEPS = bytes.maketrans(b"[{]}", b"\2\2\0\0")  # one more than the change of depth


@dataclass(slots=True)
class JsonShape:
    """Counts of one JSON text; meaningless for a text that is not JSON."""

    containers: int = 0
    members: int = 0
    decimals: int = 0
    depth: int = 0
    has_long_number: bool = False  # surely found if it is twice the limit

    def excess(self) -> str | None:
        """Return the exceeded bound, in words for the client; None if there is none."""
        if self.depth > MAX_DEPTH:
            return f"nested too deeply: at most {MAX_DEPTH} levels are allowed"
        if self.has_long_number:
            return f"too complex: a number may have at most {MAX_DIGITS} digits"
        counts = (
            (self.containers, MAX_CONTAINERS, "objects and lists"),
            (self.members, MAX_MEMBERS, "names with values"),
            (self.decimals, MAX_DECIMALS, "numbers with a fraction or an exponent"),
        )
        for count, most, what in counts:
            if count > most:
                return f"too complex: at most {most} {what} are allowed"
        return None


def shape_of(data: bytes | bytearray) -> JsonShape:
    """Return the shape of a JSON text. The content of strings does not count."""
    if _most_brackets(data) <= MAX_DEPTH and len(data) <= 2 * MAX_DECIMALS:
        return JsonShape()  # too small to exceed a bound, like nearly all requests
    shape, depth, is_inside = JsonShape(), 0, False
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quote begins or ends a string
    for start in range(0, len(plain), _PIECE_BYTES):
        parts = bytes(plain[start : start + _PIECE_BYTES]).split(b'"')
        outside = b'"'.join(parts[1 if is_inside else 0 :: 2])
        is_inside ^= len(parts) % 2 == 0
        shape.members += outside.count(b":")
        shape.decimals += len(_DECIMAL.findall(outside))
        shape.has_long_number |= b"0" * (MAX_DIGITS + 1) in outside.translate(_DIGITS)
        brackets = outside.translate(_STEPS, _NO_BRACKETS)
        shape.containers += brackets.count(2)
        levels = list(accumulate((step - 1 for step in brackets), initial=depth))
        shape.depth, depth = max((shape.depth, *levels)), levels[-1]
        if shape.excess() is not None:
            break
    return shape


def containers_in(text: str) -> int:
    """Return how many objects and lists a JSON text has; an upper bound if that is small."""
    data = text.encode()
    most = _most_brackets(data)
    return most if most <= MAX_DEPTH else shape_of(data).containers


def _most_brackets(data: bytes | bytearray) -> int:
    return data.count(b"{") + data.count(b"[")
