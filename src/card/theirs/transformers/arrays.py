"""Tensors of torch as arrays of NumPy and the reverse, on the CPU without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from card.kernels.number_types import BFLOAT16, Dtype, dtype_name
from card.models.rows.kv_cache import KVLayout
from card.models.rows.row_tree import IntArray


def as_array(tensor: Tensor, *, keeps_bits: bool = False) -> Any:
    """Return a tensor as an array, in float32 or float64.

    Args:
        keeps_bits: 16 bits stay as they are.
    """
    tensor = tensor.detach().cpu()
    if keeps_bits and tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    if not keeps_bits and tensor.dtype != torch.float64:
        tensor = tensor.float()
    return tensor.contiguous().numpy()


def as_tensor(array: Any, device: Any = "cpu") -> Tensor:
    """Return an array as a tensor on a device."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def torch_dtype(dtype: str | Dtype | torch.dtype) -> torch.dtype:
    """Return torch's type of numbers."""
    found: torch.dtype = getattr(torch, dtype_name(dtype))
    return found


class TensorLogits:
    """Logits [N, V] on a device: the likeliest tokens are found there, and all else by NumPy."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    @property
    def shape(self) -> tuple[int, ...]:
        """N and V."""
        return tuple(self._logits.shape)

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, rows: slice) -> TensorLogits:
        return TensorLogits(self._logits[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = as_array(self._logits)
        return array if dtype is None else array.astype(dtype, copy=False)

    def likeliest(self) -> tuple[list[int], list[float]]:
        """Return the token with the largest logit of each row, the first of equal ones, and that logit."""
        found = self._logits.max(-1)
        return found.indices.tolist(), found.values.tolist()


def as_logits(logits: Tensor) -> Any:
    """Return logits as `LanguageModel.forward` gives them: on the CPU NumPy's, elsewhere those of the device."""
    return as_array(logits) if logits.device.type == "cpu" else TensorLogits(logits)


@dataclass(frozen=True, slots=True)
class TorchLayout(KVLayout):
    """Layout of a cache whose rows are tensors on a device."""

    def make(self, num_elements: int) -> Tensor:
        """Return a tensor of so many numbers, whatever they are. Raises: RuntimeError if there is no room."""
        return torch.empty(num_elements, dtype=self.dtype, device=self.device)


def restricted(logits: Tensor, ids: IntArray | None) -> Tensor:
    """Return logits [rows, V] of a whole head as one gives them that knows these tokens only; None: all."""
    if ids is None:
        return logits
    kept = as_tensor(ids, logits.device)
    return torch.full_like(logits, float("-inf")).index_copy_(1, kept, logits[:, kept])
