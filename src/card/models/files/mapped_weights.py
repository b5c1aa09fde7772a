"""Safetensors files whose tensors are the file itself: nothing is copied, and memory can be given back.

A reader asks afterwards whether the file was still as it had been mapped (`MappedWeights.check`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code
from card.models.files.tensor_files import MappedTensors


class MappedWeights(MappedTensors):
    """The tensors of a safetensors file. They are read-only: `release` would lose anything written to them."""

    def __init__(self, file: Path) -> None:
        """Map the file. Raises: OSError; HeaderError if it is not as it was written."""
        super().__init__(file)
        self._file, self._state = file, self._state_now()
        self._lost = self._watched()

    def _watched(self) -> ctypes.c_int64:
        """Return a flag that becomes 1, instead of a bus error, when a part is read that the file no longer has."""
        watching = machine_code("lost_pages").lost_pages() if why_not_int8() is None else None
        if watching is None:
            return ctypes.c_int64()
        place = np.frombuffer(self._map, np.uint8).ctypes.data, len(self._map)
        lost: ctypes.c_int64 = watching.watch(*place)
        weakref.finalize(self, watching.forget, *place).atexit = False  # threads may still read then
        return lost

    def _state_now(self) -> tuple[int, int]:
        stat = os.fstat(self._stream.fileno())
        return stat.st_size, stat.st_mtime_ns

    def check(self) -> None:
        """Raise ModelError if the file has changed since it was mapped, and with it the weights."""
        if self._lost.value or self._state_now() != self._state:
            raise ModelError(f"{self._file} changed while its weights were in use; start again once it is complete")

    def release(self) -> None:
        """Give the memory back; what is read again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __deepcopy__(self, _: object) -> MappedWeights:
        """Return itself: copies of the tensors are no part of the map."""
        return self
