"""The header of a GGUF file: metadata and the places of its tensors, read without mapping the file.

A mapped file that is cut off while it is read ends the process; one that is read is only short. Everything is compared
with the size of the file before it is used. The memory that a header can take is bounded: arrays that are not needed
are skipped, and there are limits for the other arrays, for texts, entries and tensors.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_CUT_OFF = "cut off or damaged: it ends inside its header"
_NO_UTF8 = "damaged: a name or text in its header is not valid UTF-8"
_ALIGNMENT = 32  # of the tensors, unless the file says otherwise
# Bounds far above what files have: some dozen entries, some thousand tensors, 1.5 million tokens, merges and types.
_MOST_ENTRIES = 1 << 14
_MOST_TENSORS = 1 << 17
_MOST_LISTED = 1 << 23  # values of all arrays that are kept
_MOST_NAME_BYTES = (1 << 16) - 1  # as the format has it
_MOST_TEXT_BYTES = 1 << 24  # of one text; the longest are chat templates and licences
_MOST_HEADER_TEXT_BYTES = 1 << 28  # of all texts together
_SHORT_ARRAY = 1 << 12  # values; enough for one of each layer
_LONG_ARRAYS = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))


class GgufError(ValueError):
    """A fault that makes a GGUF file useless, in words that follow its name."""


class DamagedError(GgufError):
    """A file that is not as its maker wrote it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"is {what}; copy or download it again")


@dataclass(frozen=True, slots=True)
class LongArray:
    """Stands for a long array that is skipped."""

    num_values: int

    def __str__(self) -> str:
        return f"an array of {self.num_values} values"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor in its file."""

    name: str  # llama.cpp's
    shape: tuple[int, ...]  # as torch has it: the fastest index last
    type_id: int  # of ggml
    offset: int  # from the beginning of the file
    file: Path

    @property
    def num_rows(self) -> int:
        """Number of rows of the last index."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tensors."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]  # by name
    num_bytes: int  # of the file, or of all parts

    @property
    def architecture(self) -> str:
        """The kind of model, as llama.cpp calls it."""
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> Header:
    """Return what stands before the tensors of a file.

    Raises: GgufError if it is no GGUF file, cut off or damaged; OSError if it cannot be read.
    """
    with path.open("rb") as stream:
        reader = _Reader(path, stream)
        if reader.taken(4) != MAGIC:
            raise GgufError("is no GGUF file: it does not begin with GGUF")
        (version,) = reader.numbers("I")
        if version not in _VERSIONS:
            raise GgufError(f"has version {version} of the GGUF format; versions 2 and 3 can be read")
        num_tensors, num_entries = reader.numbers("QQ")
        _check_most(num_tensors, _MOST_TENSORS, "tensors")
        _check_most(num_entries, _MOST_ENTRIES, "entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = reader.string(_MOST_NAME_BYTES)
            if name in metadata:
                raise DamagedError(f"damaged: it has two entries {name[:100]}")
            metadata[name] = reader.value(*reader.numbers("I"), may_be_long=name in _LONG_ARRAYS)
        tensors: dict[str, TensorPlace] = {}
        for _ in range(num_tensors):
            place = reader.place()
            if place.name in tensors:
                raise DamagedError(f"damaged: it has two tensors {place.name}")
            tensors[place.name] = place
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise DamagedError(f"damaged: its tensors are aligned to {alignment} bytes")
        start = -(-stream.tell() // alignment) * alignment
    moved = {name: replace(place, offset=start + place.offset) for name, place in tensors.items()}
    return Header(metadata, moved, reader.num_bytes)


def _check_most(number: int, most: int, what: str) -> None:
    if number > most:
        raise DamagedError(f"damaged: its header has {number} {what}, and at most {most} are possible")


class _Reader:
    """Takes one thing after the other from a file of known size."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._num_listed = self._num_text_bytes = 0  # so far
        self.num_bytes = path.stat().st_size

    def taken(self, length: int) -> bytes:
        taken = self._stream.read(length) if length <= self.num_bytes else b""
        if len(taken) < length:
            raise DamagedError(_CUT_OFF)
        return taken

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{kinds}", self.taken(struct.calcsize(f"<{kinds}")))

    def string(self, most: int = _MOST_TEXT_BYTES) -> str:
        return _text(self._text_bytes(most))

    def value(self, kind: int, *, may_be_long: bool) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise DamagedError(f"damaged: its header has a value of the unknown kind {kind}")
        kind, count = self.numbers("IQ")
        if kind == _ARRAY:
            raise DamagedError("damaged: its header has an array of arrays")
        if kind != _STRING and kind not in _NUMBERS:
            raise DamagedError(f"damaged: its header has a value of the unknown kind {kind}")
        if count > self.num_bytes:
            raise DamagedError(_CUT_OFF)
        if count > _SHORT_ARRAY and not may_be_long:
            self._pass_over(kind, count)
            return LongArray(count)
        self._num_listed += count
        _check_most(self._num_listed, _MOST_LISTED, "values in its arrays")
        if kind == _STRING:
            return [_text(text) for text in [self._text_bytes(_MOST_TEXT_BYTES) for _ in range(count)]]
        return list(self.numbers(f"{count}{_NUMBERS[kind]}"))

    def place(self) -> TensorPlace:
        name = self.string(_MOST_NAME_BYTES)
        (num_dimensions,) = self.numbers("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise DamagedError(f"damaged: its tensor {name[:100]} has {num_dimensions} dimensions")
        shape = self.numbers(f"{num_dimensions}Q")[::-1]
        type_id, offset = self.numbers("IQ")
        if not all(shape):
            raise DamagedError(f"damaged: its tensor {name[:100]} has the shape {list(shape)}")
        return TensorPlace(name, shape, type_id, offset, self._path)

    def _text_bytes(self, most: int) -> bytes:
        """Return the bytes of a text: a vocabulary and its merges are some hundred thousand."""
        length_bytes = self._stream.read(8)
        length = int.from_bytes(length_bytes, "little")
        if len(length_bytes) < 8 or length > self.num_bytes:
            raise DamagedError(_CUT_OFF)
        self._num_text_bytes += length
        _check_most(length, most, "bytes in one text")
        _check_most(self._num_text_bytes, _MOST_HEADER_TEXT_BYTES, "bytes of text")
        text = self._stream.read(length)
        if len(text) < length:
            raise DamagedError(_CUT_OFF)
        return text

    def _pass_over(self, kind: int, count: int) -> None:
        """Go to the end of an array without keeping it; what lies behind the file is noticed by the next read."""
        if kind in _NUMBERS:
            self._stream.seek(count * struct.calcsize(f"<{_NUMBERS[kind]}"), os.SEEK_CUR)
            return
        _check_most(count, _MOST_LISTED, "values in its arrays")
        for _ in range(count):
            self._text_bytes(_MOST_TEXT_BYTES)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedError(_NO_UTF8) from None
