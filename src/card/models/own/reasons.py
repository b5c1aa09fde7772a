"""Reasons why models have no pass of our own, which is machine code on a CPU and torch over the weights elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from card.kernels.float_linear import FLOAT_PRODUCTS
from card.kernels.int8_linear import why_not_int8
from card.models.architectures import all_architectures
from card.models.architectures.architecture import ACTIVATIONS, head_dim, rotary_parameters, rotary_size
from card.models.facts import context_limit
from card.models.layer_kinds import WITH_CHUNKS, layer_kinds
from card.models.long_rope import switch_len
from card.models.own.block_layers import BlockLinear, has_blocks
from card.models.own.decoder_model import RotaryEmbedding, architecture_of, is_int8

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel


def why_not_walked(model: LoadedModel, max_model_len: int) -> str | None:
    """Return why the weights of a model cannot be walked directly on any device, or None if they can."""
    architecture = architecture_of(model)
    if architecture is None:
        return f"{type(model).__name__} is none of {', '.join(one.model_class for one in all_architectures())}"
    config = model.config
    inner: Any = model.model
    if not WITH_CHUNKS.isdisjoint(layer_kinds(config)):
        return "its attention is chunked"
    if (activation := getattr(config, architecture.activation)) not in ACTIVATIONS:
        return f"its activation is {activation}, not {' or '.join(ACTIVATIONS)}"
    if switch_len(model, max_model_len) is not None:
        return "its rotary embedding (longrope) changes with the length of the text"
    kinds = {kind for kind in architecture.rotary_kinds(config) if kind is not None}
    if not kinds <= rotary_parameters(config).keys():
        return "its config does not say which rotary embedding each layer has"
    sizes = {kind: rotary_table(model, 1, torch.float32, kind)[0].shape[-1] for kind in kinds}
    if any(size != rotary_size(config, kind) for kind, size in sizes.items()) or (
        not architecture.turns_parts and set(sizes.values()) - {head_dim(config)}
    ):
        return "its rotary embedding turns only a part of each head"
    tensors = [p for p in model.parameters() if p.is_floating_point()]
    mixed = len({(p.device, p.dtype) for p in tensors}) > 1 and not has_blocks(model)
    if mixed or tensors[0].device.type == "meta":
        return "its weights are spread over several devices or dtypes"
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            return "its modules carry device hooks"
    for layer in inner.layers:
        for part in architecture.linears:
            if type(layer.get_submodule(part.name)) not in (nn.Linear, BlockLinear):
                kind = type(layer.get_submodule(part.name))
                return f"its {part.name} is a {kind.__name__}, not a plain linear layer"
    return None


def why_not_exact(model: LoadedModel) -> str | None:
    """Return why the machine code cannot run a model that can be walked, or None if it can."""
    if model.device.type != "cpu":
        return f"it is on {model.device}, and machine code runs on a CPU only"
    if not is_int8(model) and model.dtype not in FLOAT_PRODUCTS:
        return f"its weights are {str(model.dtype).removeprefix('torch.')}"
    return why_not_int8()


def is_exact(model: LoadedModel) -> bool:
    """Return whether runners of a model use our machine code: the bits of logits depend on the text alone."""
    return is_int8(model) or (why_not_exact(model) is None and why_not_walked(model, context_limit(model)) is None)


def could_run_int8(model: LoadedModel) -> bool:
    """Return whether a model runs its weights of 16 or 32 bits in our machine code, which has integers too."""
    return is_exact(model) and not is_int8(model) and not has_blocks(model)


def rotary_table(model: LoadedModel, num_positions: int, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin [num_positions, channels that turn] for one of a model's `rotary_parameters`.

    They are those of its own rotary module, for halves of a head.
    """
    inner: Any = model.model
    architecture = architecture_of(model)
    assert architecture is not None
    like = inner.norm.weight[None, None].to(dtype)
    positions = torch.arange(num_positions, device=like.device)[None]
    rotate = RotaryEmbedding(model.config) if architecture.turns_neighbours else inner.rotary_emb
    cos, sin = rotate(like, positions, *([kind] if kind else []))
    return cos[0].to(dtype), sin[0].to(dtype)
