"""Tensors of folders whose weights are pickles, read as weights only: nothing in them is run."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from card.backends.transformers.arrays import as_array
from card.kernels.number_types import Array
from card.models.files.weight_files import FolderError, pickled_files


def read_pickled(folder: Path) -> dict[str, Array]:
    """Return all tensors by name, with their bits as stored.

    Raises: FolderError if there are none; almost anything, if a file holds more than weights.
    """
    files = pickled_files(folder)
    if not files:
        raise FolderError("it holds neither model.safetensors nor pytorch_model.bin")
    found: dict[str, Array] = {}
    for file in files:
        if not zipfile.is_zipfile(file):
            raise FolderError(f"its {file.name} is cut off, or no file as torch.save writes it; download it again")
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not (isinstance(stored, dict) and all(isinstance(tensor, Tensor) for tensor in stored.values())):
            raise FolderError(f"its {file.name} holds something else than tensors by name; download it again")
        found |= {name: as_array(tensor, keeps_bits=True) for name, tensor in stored.items()}
    return found
