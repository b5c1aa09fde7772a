"""Layers of exact passes: weights packed as the machine code reads them, and tables of the angles of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from card.kernels.float_linear import FLOAT_PRODUCTS, float_linear
from card.kernels.int8_linear import quantize_linear
from card.kernels.packed_linear import PANEL, PackedLinear
from card.kernels.rotation import inverse_frequencies, rotation_tables
from card.models.architectures.architecture import rotary_parameters, rotary_size
from card.models.own.block_layers import BlockLinear, has_blocks
from card.models.own.decoder_model import is_int8
from card.models.own.reasons import rotary_table

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel

Pack = Callable[[Tensor, Tensor | None, float, int], PackedLinear]  # weight, bias, factor, out_multiple


def with_padded_heads(weight: Tensor, num_heads: int, dim: int, size: int) -> Tensor:
    """Return a weight whose dimension ``dim`` is heads, each followed by zeros up to ``size``."""
    split: Tensor = weight.unflatten(dim, (num_heads, -1))  # type: ignore[no-untyped-call]
    return (
        nn.functional.pad(split.transpose(dim + 1, -1), (0, size - split.shape[dim + 1]))
        .transpose(dim + 1, -1)
        .flatten(dim, dim + 1)
    )


def in_integers(weight: Tensor, bias: Tensor | None, factor: float, out_multiple: int) -> PackedLinear:
    """Return a layer of 8-bit integers whose results are times a factor, which goes into their scales."""
    if factor != 1.0:
        weight, bias = weight.float() * factor, None if bias is None else bias * factor
    return quantize_linear(weight, bias, out_multiple=out_multiple)


def as_stored(weight: Tensor, bias: Tensor | None, factor: float, out_multiple: int) -> PackedLinear:
    """Return a layer with these weights whose results are times a factor."""
    bias = None if bias is None else bias.float() * factor
    return float_linear(weight, bias, factor=factor, out_multiple=out_multiple)


def products_of(model: LoadedModel) -> list[str]:
    """Return the formats of a model's linear layers, each once."""
    numbers = "byte" if is_int8(model) and not has_blocks(model) else None
    formats: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, BlockLinear):
            formats[module.product] = None
        elif isinstance(module, nn.Linear):
            formats[numbers or FLOAT_PRODUCTS[module.weight.dtype]] = None
    return list(formats)


def packed(
    pack: Pack, linear: nn.Linear | BlockLinear, *, factor: float = 1.0, out_multiple: int = PANEL
) -> PackedLinear:
    """Return a layer whose results are times a factor."""
    if isinstance(linear, BlockLinear):
        return linear.packed(factor=factor, out_multiple=out_multiple)
    return pack(linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), factor, out_multiple)


def packed_heads(
    pack: Pack, linear: nn.Linear | BlockLinear, order: list[int] | None, num_heads: int, size: int
) -> PackedLinear:
    """Return a layer whose outputs are heads, each followed by zeros up to ``size``.

    Args:
        order: which channel of a head comes where; None for as they are.
    """
    if isinstance(linear, BlockLinear):  # whose heads need no zeros
        channels = torch.arange(linear.out_features).view(num_heads, -1)
        return (linear if order is None else linear.select(channels[:, order].flatten())).packed()
    columns = [linear.weight.detach()] + ([] if linear.bias is None else [linear.bias.detach()[:, None]])
    if order is not None:
        columns = [one.view(num_heads, -1, one.shape[1])[:, order].flatten(0, 1) for one in columns]
    weight, *bias = (with_padded_heads(one, num_heads, 0, size) for one in columns)
    return pack(weight, bias[0][:, 0] if bias else None, 1.0, PANEL)


def turning_tables(model: LoadedModel, num_positions: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin [num_positions, channels that turn] of float32, for halves of a head.

    They have the same bits on every computer if the type of the angles is known.
    """
    frequencies = inverse_frequencies(rotary_parameters(model.config)[kind], rotary_size(model.config, kind))
    if frequencies is None:
        cos, sin = rotary_table(model, num_positions, torch.float32, kind)
        return cos.contiguous(), sin.contiguous()
    halves = rotation_tables(frequencies, num_positions)
    cos, sin = (torch.from_numpy(table).repeat(1, 2) for table in halves)
    return cos, sin


def angles_of_axes(tables: tuple[Tensor, Tensor], positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, channels] of rows with positions [3, T], of which each channel takes that of its axis."""
    cos, sin = (table[positions].gather(0, axes.expand(1, positions.shape[1], -1))[0] for table in tables)
    return cos, sin


def mirrored_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm as a layer norm of (x, -x), whose mean is 0 and variance the mean square: one kernel, not six."""
    both = torch.cat((x, -x), 1)
    return nn.functional.layer_norm(both, (both.shape[1],), weight.repeat(2), None, eps)[:, : x.shape[1]]
