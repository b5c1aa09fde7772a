"""Linear layers of decoders that are walked directly: weights in the form of their kernels."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.machine.processor import computes_bfloat16

MAX_PACKED_BYTES = 4 << 30  # weights up to this are held a second time, in the order that oneDNN computes fastest with
PACKED_BATCH = 16  # rows that the packed order is chosen for; others run as fast

Linear = tuple[Any, Tensor | None]  # weight in the form of its kernels, bias [out]


class PlainKernels:
    """Weights as they are; gate and up are one product. For GPUs, float64 and models too large to hold twice."""

    def __init__(self, activation: str) -> None:
        """Take the gate's activation, one of `ACTIVATIONS`."""
        self._is_silu = activation == "silu"

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Return x W^T + b, [T, out], of x [T, in]."""
        return functional.linear(x, layer[0], layer[1])

    def linear_add(self, x: Tensor, layer: Linear, residual: Tensor) -> Tensor:
        """Return residual + x W^T + b."""
        out = torch.addmm(residual, x, layer[0].t())
        return out if layer[1] is None else out.add_(layer[1])

    def gated(self, x: Tensor, gate_up: tuple[Linear, ...]) -> Tensor:
        """Return activation(gate(x)) * up(x)."""
        gate, up = functional.linear(x, *gate_up[0]).chunk(2, -1)
        activated = functional.silu(gate) if self._is_silu else functional.gelu(gate, approximate="tanh")
        return activated.mul_(up)


class PackedKernels:
    """Weights in oneDNN's own order: no reordering in each call, and the next operation done on the way out.

    On an AVX-512 core this halves the time of small batches; rows do not depend on the batch size from 2 rows on.
    """

    def __init__(self, activation: str) -> None:
        is_silu = activation == "silu"
        self._activation: tuple[str, list[float], str] = ("swish", [], "") if is_silu else ("gelu", [], "tanh")
        self._linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._linear_binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        return self._linear(x, layer[0], layer[1], "none", [], "")

    def linear_add(self, x: Tensor, layer: Linear, residual: Tensor) -> Tensor:
        return self._linear_binary(x, residual, layer[0], layer[1], "add")

    def gated(self, x: Tensor, gate_up: tuple[Linear, ...]) -> Tensor:
        (gate, gate_bias), (up, up_bias) = gate_up
        return self._linear_binary(x, self._linear(x, gate, gate_bias, *self._activation), up, up_bias, "mul")


def can_pack(weight: Tensor, num_bytes: int) -> bool:
    """Return whether weights of this kind, ``num_bytes`` in all, are held in oneDNN's order too."""
    if weight.device.type != "cpu" or num_bytes > MAX_PACKED_BYTES or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return computes_bfloat16(weight.device)
    return weight.dtype == torch.float32


def joined(linears: Sequence[nn.Linear]) -> Linear:
    """Return the layers as one; a missing bias counts as 0 where another has one."""
    biases = [m.bias for m in linears]
    bias = None
    if any(b is not None for b in biases):
        parts = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in linears]
        bias = torch.cat([part.detach() for part in parts])
    weights = [m.weight.detach() for m in linears]
    if len(weights) == 1:
        return weights[0], bias
    joined = as_shared(weights)
    return torch.cat(weights) if joined is None else joined, bias


def as_shared(weights: Sequence[Tensor]) -> Tensor | None:
    """Return weights that an earlier decoder of the same model has joined as one; None if they are apart."""
    first, place = weights[0], weights[0].storage_offset()
    for weight in weights:
        is_next = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or weight.storage_offset() != place or not weight.is_contiguous():
            return None
        place += weight.numel()
    return first.as_strided((sum(len(weight) for weight in weights), first.shape[1]), first.stride())


def share(linears: Sequence[nn.Linear], joined: Tensor) -> None:
    """Let the layers' own weights be views of the joined one, so that memory is not doubled."""
    for module, view in zip(linears, torch.split(joined, [m.out_features for m in linears]), strict=True):
        module.weight.data = view
