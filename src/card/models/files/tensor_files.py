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

import ml_dtypes
import numpy as np

from card.kernels.number_types import Array, Dtype
from card.machine.folders import replaced
from card.models.files.headers import FACTS, HeaderError, StoredTensor, read_header

# By the format's names. Files have the last ones first, so that all tensors lie at multiples of their numbers' sizes.
_DTYPES: Mapping[str, Dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
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
        self.arrays = {name: self._array(name, one) for name, one in stored.items()}

    def _array(self, name: str, stored: StoredTensor) -> Array:
        dtype, count = _DTYPES.get(stored.dtype), math.prod(stored.shape)
        if dtype is None or stored.end - stored.first != count * dtype.itemsize:
            raise HeaderError("damaged", f"its {name} cannot be {list(stored.shape)} numbers of {stored.dtype}")
        if not count:
            return np.empty(stored.shape, dtype)
        return np.frombuffer(self._map, dtype, count, stored.first).reshape(stored.shape)


@contextlib.contextmanager
def tensors_written(
    file: Path,
    kinds: Mapping[str, tuple[Dtype, Sequence[int]]],
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


def write_tensors(file: Path, arrays: Mapping[str, Array], facts: Mapping[str, str] | None = None) -> None:
    """Write a file as safetensors itself does; it is whole or as before. Raises: OSError."""
    order = list(_NAMES)[::-1]
    ordered = dict(sorted(arrays.items(), key=lambda item: (order.index(item[1].dtype), item[0])))
    kinds = {name: (array.dtype, array.shape) for name, array in ordered.items()}
    with replaced(file) as part, tensors_written(part, kinds, facts, alignment=8) as (stream, _):
        for array in ordered.values():
            stream.write(bytes_of(array))


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of an array, as they lie in a file."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
