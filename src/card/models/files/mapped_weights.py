"""Safetensors files whose tensors are the file itself: nothing is copied, and memory can be given back.

Whoever reads them asks afterwards whether the file was still as it had been mapped (`MappedWeights.check`).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from card.errors import ModelError
from card.kernels.int8_linear import machine_code, why_not_int8

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
ALIGNMENT = 64  # of the first tensor, for the processor's wide loads


class MappedWeights:
    """The tensors of a safetensors file. Nobody writes to them: what was written would be lost with `release`."""

    def __init__(self, file: Path) -> None:
        """Map the file. Raises: OSError, ValueError, KeyError if it is not as it was written."""
        self._file, self._stream = file, file.open("rb")
        self._map = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_COPY)
        weakref.finalize(self, self._stream.close)
        self._facts = self._facts_now()
        self._lost = self._watched()
        start = 8 + int.from_bytes(self._map[:8], "little")
        header: dict[str, Any] = json.loads(self._map[8:start])
        header.pop("__metadata__", None)
        self.tensors: dict[str, Tensor] = {}
        for name, facts in header.items():
            first, end = facts["data_offsets"]
            if start + end > len(self._map):
                raise ValueError(f"{file} is cut off")
            dtype = _DTYPES[facts["dtype"]]
            flat = torch.frombuffer(self._map, dtype=dtype, count=(end - first) // dtype.itemsize, offset=start + first)
            self.tensors[name] = flat.view(facts["shape"])

    def _watched(self) -> ctypes.c_int64:
        """Return what becomes 1 if a part of the file is read that it no longer has, instead of a bus error."""
        watching = machine_code("lost_pages").lost_pages() if why_not_int8() is None else None
        if watching is None:
            return ctypes.c_int64()
        place = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr(), len(self._map)
        lost: ctypes.c_int64 = watching.watch(*place)
        weakref.finalize(self, watching.forget, *place).atexit = False  # threads may still read then
        return lost

    def _facts_now(self) -> tuple[int, int]:
        stat = os.fstat(self._stream.fileno())
        return stat.st_size, stat.st_mtime_ns

    def check(self) -> None:
        """Raise ModelError if the file has changed since it was mapped, and with it the weights."""
        if self._lost.value or self._facts_now() != self._facts:
            raise ModelError(f"{self._file} changed while its weights were in use; start again once it is complete")

    def release(self) -> None:
        """Give the memory back; what is read again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __deepcopy__(self, _: object) -> MappedWeights:
        """Return itself: copies of the tensors are no part of the map."""
        return self


def safetensors_header(entries: dict[str, Any]) -> bytes:
    """Return what stands before the tensors, filled up so that they are aligned."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
