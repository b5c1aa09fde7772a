"""The header of a GGUF file: metadata and the places of its tensors, read without mapping the file.

A mapped file that is cut off while it is read ends the process; one that is read is only short. Everything is compared
with the size of the file before it is believed.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
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


class GgufError(ValueError):
    """A fault that makes a GGUF file useless, in words that follow its name."""


class DamagedError(GgufError):
    """A file that is not as its maker wrote it."""

    def __init__(self, what: str) -> None:
        """Say what it is, and the next step."""
        super().__init__(f"is {what}; copy or download it again")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor in its file."""

    name: str  # llama.cpp's
    shape: tuple[int, ...]  # as torch has it: the fastest index last
    type_id: int  # of ggml
    offset: int  # from the beginning of the file

    @property
    def num_rows(self) -> int:
        """Number of rows of the last index."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tensors."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]  # by name
    num_bytes: int  # of the whole file

    @property
    def architecture(self) -> str:
        """The kind of model, as llama.cpp calls it."""
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> Header:
    """Return what stands before the tensors of a file.

    Raises: GgufError if it is no GGUF file, cut off or damaged; OSError if it cannot be read.
    """
    with path.open("rb") as stream:
        reader = _Reader(stream, path.stat().st_size)
        if reader.bytes(4) != MAGIC:
            raise GgufError("is no GGUF file: it does not begin with GGUF")
        (version,) = reader.numbers("I")
        if version not in _VERSIONS:
            raise GgufError(f"has version {version} of the GGUF format; versions 2 and 3 can be read")
        num_tensors, num_entries = reader.numbers("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = reader.string()
            metadata[name] = reader.value(*reader.numbers("I"))
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
    moved = {one.name: TensorPlace(one.name, one.shape, one.type_id, start + one.offset) for one in tensors.values()}
    return Header(metadata, moved, reader.num_bytes)


class _Reader:
    """Takes one thing after the other from a file of known size."""

    def __init__(self, stream: BinaryIO, num_bytes: int) -> None:
        self._stream = stream
        self.num_bytes = num_bytes

    def bytes(self, length: int) -> bytes:
        taken = self._stream.read(length) if length <= self.num_bytes else b""
        if len(taken) < length:
            raise DamagedError(_CUT_OFF)
        return taken

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{kinds}", self.bytes(struct.calcsize(f"<{kinds}")))

    def string(self) -> str:
        try:
            return self.bytes(*self.numbers("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise DamagedError(_NO_UTF8) from None

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise DamagedError(f"damaged: its header has a value of the unknown kind {kind}")
        of, count = self.numbers("IQ")
        if of == _ARRAY:
            raise DamagedError("damaged: its header has an array of arrays")
        if count > self.num_bytes:
            raise DamagedError(_CUT_OFF)
        if of in _NUMBERS:
            return list(self.numbers(f"{count}{_NUMBERS[of]}"))
        return self._strings(count) if of == _STRING else [self.value(of) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Return as many texts: a vocabulary and its merges are some hundred thousand."""
        read, size, found = self._stream.read, self.num_bytes, []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            text = read(length) if length <= size else b""
            if len(text) < length:
                raise DamagedError(_CUT_OFF)
            found.append(text)
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError:
            raise DamagedError(_NO_UTF8) from None

    def place(self) -> TensorPlace:
        name = self.string()
        (num_dimensions,) = self.numbers("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise DamagedError(f"damaged: its tensor {name} has {num_dimensions} dimensions")
        shape = self.numbers(f"{num_dimensions}Q")[::-1]
        type_id, offset = self.numbers("IQ")
        if not all(shape):
            raise DamagedError(f"damaged: its tensor {name} has the shape {list(shape)}")
        return TensorPlace(name, shape, type_id, offset)
