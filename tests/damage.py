"""Content of a file, damaged in the ways that files are."""

from __future__ import annotations

from collections.abc import Iterator


def damages(whole: bytes) -> Iterator[bytes]:
    """Yield the content cut off, with other bits, with other bytes behind it, and with a hole."""
    size = len(whole)
    for length in {0, 1, size // 2, size - 1}:
        yield whole[:length]
    for place in {0, size // 2, size - 1}:
        yield whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    yield whole + b"garbage"
    yield whole[: size // 2] + bytes(size - size // 2)
