"""Headers of safetensors files, compared with the size of the file; read without torch, which is slow to import."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

FACTS = "__metadata__"  # what the facts are called among the tensors
_MOST_BYTES = 100_000_000  # as safetensors itself allows


class HeaderError(ValueError):
    """A file that is not as it was written. ``state`` is a word or two, such as "cut off"; the text says why."""

    def __init__(self, state: str, why: str) -> None:
        super().__init__(why)
        self.state = state


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    dtype: str  # by the format's name
    shape: tuple[int, ...]
    first: int  # byte of the file
    end: int


def read_header(stream: BinaryIO) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the facts and tensors in a file's header. Raises: HeaderError if the file cannot match it, OSError."""
    num_bytes = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if num_bytes < 8 or length > min(num_bytes - 8, _MOST_BYTES):
        raise HeaderError("cut off or damaged", "it ends inside its header")
    try:
        stated = json.loads(stream.read(length))
        facts = dict(stated.pop(FACTS, None) or {})
        tensors = {name: _stored(about, 8 + length, num_bytes) for name, about in stated.items()}
        end = max((tensor.end for tensor in tensors.values()), default=0)
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        raise HeaderError("damaged", "its header cannot be read") from None
    if end > num_bytes:
        raise HeaderError("cut off", f"its tensors end at byte {end}, the file at {num_bytes}")
    return facts, tensors


def _stored(about: Mapping[str, Any], start: int, num_bytes: int) -> StoredTensor:
    shape, (first, end) = tuple(about["shape"]), about["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in shape) or math.prod(shape) > num_bytes * 8:
        raise ValueError
    return StoredTensor(about["dtype"], shape, start + first, start + end)
