"""Linear layers joined into one product, without a second copy of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from card.models.architectures import Architecture
from card.models.architectures.architecture import sizes_of
from card.models.parts import SPLITS

Linear = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


def linears_of(layer: nn.Module, architecture: Architecture, config: Any) -> list[nn.Linear]:
    """Return query, key, value, output, gate, up and down of a layer; views of weights that are stored as one."""
    found: list[nn.Linear] = []
    sizes = sizes_of(config, architecture.layer_shape(config, 0))
    for part in architecture.linears:
        whole = cast(nn.Linear, layer.get_submodule(part.name))
        if part.shape[0] not in SPLITS:
            found.append(whole)
            continue
        rows = [sizes[size] for size in SPLITS[part.shape[0]]]
        biases = [None] * len(rows) if whole.bias is None else torch.split(whole.bias.detach(), rows)
        weights = torch.split(whole.weight.detach(), rows)
        found += [linear_of(*pair) for pair in zip(weights, biases, strict=True)]
    return found


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a layer with these weights [out, in], without random initialisation."""
    layer = nn.Linear(1, 1, bias=bias is not None)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def joined(linears: Sequence[nn.Linear]) -> Linear:
    """Return the layers as one; a missing bias counts as 0 if another layer has one."""
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
    """Return weights that an earlier decoder of the same model has joined; None if they are separate."""
    first, place = weights[0], weights[0].storage_offset()
    for weight in weights:
        is_next = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or weight.storage_offset() != place or not weight.is_contiguous():
            return None
        place += weight.numel()
    return first.as_strided((sum(len(weight) for weight in weights), first.shape[1]), first.stride())


def share(linears: Sequence[nn.Linear], joined: Tensor) -> None:
    """Make the layers' own weights views of the joined one, so that memory is not doubled."""
    for module, view in zip(linears, torch.split(joined, [m.out_features for m in linears]), strict=True):
        module.weight.data = view
