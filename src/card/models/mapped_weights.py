"""Safetensors files whose tensors are the file itself: nothing is copied, and memory can be given back."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
ALIGNMENT = 64  # of the first tensor, for the processor's wide loads


class MappedWeights:
    """The tensors of a safetensors file. Nobody writes to them: what was written would be lost with `release`."""

    def __init__(self, file: Path) -> None:
        """Map the file. Raises: OSError, ValueError, KeyError if it is not as it was written."""
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
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
