"""Convert tensors of torch to arrays of NumPy and back, on the CPU without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from card.kernels.number_types import BFLOAT16, Dtype, dtype_name
from card.models.rows.kv_layout import KVLayout
from card.models.rows.row_tree import IntArray


def as_array(tensor: Tensor, *, keeps_bits: bool = False) -> Any:
    """Return a tensor as an array, in float32 or float64.

    Args:
        keeps_bits: keep 16-bit numbers unchanged.
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
    """Return a dtype of torch."""
    torch_dtype: torch.dtype = getattr(torch, dtype_name(dtype))
    return torch_dtype


class TensorLogits:
    """Logits [N, V] on a device: the likeliest tokens are found there, everything else by NumPy."""

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
        best = self._logits.max(-1)
        return best.indices.tolist(), best.values.tolist()


def as_logits(logits: Tensor) -> Any:
    """Return logits as results of `LanguageModel.forward`: an array on the CPU, else `TensorLogits`."""
    return as_array(logits) if logits.device.type == "cpu" else TensorLogits(logits)


@dataclass(frozen=True, slots=True)
class TorchLayout(KVLayout):
    """Layout of a cache whose rows are tensors on a device, those of a sequence side by side as torch reads them."""

    block_rows: ClassVar[int | None] = None

    def make(self, num_elements: int) -> Tensor:
        """Return an uninitialised tensor of ``num_elements`` numbers. Raises: RuntimeError if there is no room."""
        return torch.empty(num_elements, dtype=self.dtype, device=self.device)


def restricted(logits: Tensor, ids: IntArray | None) -> Tensor:
    """Return logits [rows, V] of a head that is restricted to these tokens; None: all."""
    if ids is None:
        return logits
    places = as_tensor(ids, logits.device)
    return torch.full_like(logits, float("-inf")).index_copy_(1, places, logits[:, places])
