"""Safetensors files: tensors that are mapped out of one, and a file that is written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from card.machine.folders import replaced
from card.models.files.headers import FACTS, HeaderError, StoredTensor, read_header

# By the format's names. Files have the last ones first, so that all tensors lie at multiples of their numbers' sizes.
_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class MappedTensors:
    """The tensors of a file, which are the file itself: nothing is copied."""

    def __init__(self, file: Path) -> None:
        """Map the file. Raises: OSError; HeaderError if it is not as it was written."""
        self._stream = file.open("rb")
        weakref.finalize(self, self._stream.close)
        self.facts, stored = read_header(self._stream)
        self._map = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.tensors = {name: self._tensor(name, one) for name, one in stored.items()}

    def _tensor(self, name: str, stored: StoredTensor) -> Tensor:
        dtype, count = _DTYPES.get(stored.dtype), math.prod(stored.shape)
        if dtype is None or stored.end - stored.first != count * dtype.itemsize:
            raise HeaderError("damaged", f"its {name} cannot be {list(stored.shape)} numbers of {stored.dtype}")
        if not count:
            return torch.empty(stored.shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.first).view(stored.shape)


@contextlib.contextmanager
def tensors_written(
    file: Path,
    kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    facts: Mapping[str, str] | None = None,
    alignment: int = 64,
) -> Iterator[tuple[BinaryIO, Mapping[str, int]]]:
    """Begin a file, to write the tensors to: one behind the other, or each to its place.

    Args:
        kinds: dtypes and shapes, in the order in which they lie in the file.
        facts: as safetensors has them for torch, if there are no others.
        alignment: of the first tensor, for the processor's wide loads.
    Yields: the stream, and the byte of the file at which each tensor begins.
    Raises: OSError.
    """
    header, places, end = dict[str, object](), dict[str, int](), 0
    for name, (dtype, shape) in kinds.items():
        places[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": tuple(shape), "data_offsets": (places[name], end)}
    said = {FACTS: dict(facts or {"format": "pt"}), **header}
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.flush()
        yield stream, {name: 8 + len(text) + place for name, place in places.items()}
        stream.flush()
        os.fsync(stream.fileno())  # before it gets its name: a power failure leaves no file with holes


def write_tensors(file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write a file as safetensors itself does; it is whole or as before. Raises: OSError."""
    order = list(_NAMES)[::-1]
    ordered = dict(sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])))
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in ordered.items()}
    with replaced(file) as part, tensors_written(part, kinds, facts, alignment=8) as (stream, _):
        for tensor in ordered.values():
            stream.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, as they lie in a file."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
