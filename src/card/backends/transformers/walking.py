"""Read models of transformers for our own pass, or state why it cannot run them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from card.backends.transformers.arrays import as_array
from card.backends.transformers.generic import require_causal
from card.errors import ModelError
from card.kernels.float_linear import FLOAT_PRODUCTS
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import STORED_DTYPES, Floats, dtype_name
from card.models.architectures import Architecture, all_architectures, find_architecture
from card.models.architectures.architecture import ACTIVATIONS, rotary_parameters, rotary_size
from card.models.layer_kinds import WITH_CHUNKS, WITH_STATE, has_state, layer_kinds
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.own.expert_weights import split_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARKS = ("computes_int8", "parallel_draft", "head_ids")  # attributes that other packages set on a model


def architecture_of(model: PreTrainedModel) -> Architecture | None:
    """Return the architecture of a model; None if the table has no entry for it."""
    kind, entry = type(model), find_architecture(model.config.model_type)
    is_it = entry is not None and kind.__name__ == entry.model_class
    return entry if is_it and kind.__module__.startswith("transformers.models.") else None


def why_not_walked(model: PreTrainedModel) -> str | None:
    """Return why the weights of a model cannot be walked directly on any device, or None if they can."""
    architecture = architecture_of(model)
    if architecture is None:
        return f"{type(model).__name__} is not among {', '.join(one.model_class for one in all_architectures())}"
    config = model.config
    inner: Any = model.model
    if (reason := _why_not_of(architecture, config)) is not None:
        return reason
    kinds = architecture.rotary_kinds(config)
    if not {kind for kind in kinds if kind is not None} <= rotary_parameters(config).keys():
        return "its config does not say which rotary embedding each layer has"
    heads = {
        (kind, architecture.layer_shape(config, idx).head_size) for idx, kind in enumerate(kinds) if kind is not None
    }
    for rotation, head_size in heads:
        turned = rotary_table(model, 1, torch.float32, rotation)[0].shape[-1]
        if turned != rotary_size(config, rotation, head_size) or not (architecture.turns_parts or turned == head_size):
            return "its rotary embedding turns only a part of each head"
    tensors = [p for p in model.parameters() if p.is_floating_point()]
    if len({(p.device, p.dtype) for p in tensors}) > 1 or tensors[0].device.type == "meta":
        return "its weights are spread over several devices or dtypes"
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            return "its modules carry device hooks"
    for idx, layer in enumerate(inner.layers[: config.num_hidden_layers]):
        for part in architecture.linears_of(architecture.layer_shape(config, idx)):
            if (kind := type(layer.get_submodule(part.name))) is not nn.Linear:
                return f"its {part.name} is a {kind.__name__}, not a plain linear layer"
    return None


def _has_known_mixers(model: PreTrainedModel) -> bool:
    """Return whether the machine code has all layers with a state that a model has."""
    architecture = architecture_of(model)
    with_state = WITH_STATE.intersection(layer_kinds(model.config))
    return architecture is not None and with_state <= architecture.mixers.keys()


def _why_not_of(architecture: Architecture, config: Any) -> str | None:
    """Return why models of a config cannot be walked, whatever weights they have."""
    if not WITH_CHUNKS.isdisjoint(layer_kinds(config)):
        return "its attention is chunked"
    if (activation := architecture.gate_activation(config)) not in ACTIVATIONS:
        return f"its activation is {activation}, not {' or '.join(ACTIVATIONS)}"
    return architecture.refusal(config)


def why_not_exact(model: PreTrainedModel) -> str | None:
    """Return why the machine code cannot run a model, or None if it can."""
    require_causal(model)
    if has_state(model) and not _has_known_mixers(model):
        return "it keeps a recurrent state"
    if (reason := why_not_walked(model)) is not None:
        return reason
    if model.device.type != "cpu":
        return f"it is on {model.device}, and machine code runs on a CPU only"
    stored = STORED_DTYPES.get(dtype_name(model.dtype))
    if not is_int8(model) and stored not in FLOAT_PRODUCTS:
        return f"its weights are {dtype_name(model.dtype)}"
    return why_not_int8()


def walked(model: PreTrainedModel) -> DecoderModel | None:
    """Return a model for our own pass that has the weights of ``model``, without copies; None if it cannot run it.

    Raises: ModelError if the model does not continue text.
    """
    return None if why_not_exact(model) is not None else decoder_of(model)


def decoder_of(model: PreTrainedModel) -> DecoderModel:
    """Return a decoder for our own pass with a model's weights: the same memory on the CPU, else copies.

    Raises: ModelError if the weights do not fit its config.
    """
    architecture = architecture_of(model)
    assert architecture is not None
    weights = {name: as_array(tensor, keeps_bits=True) for name, tensor in _weights(model)}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    generation: Any = model.generation_config
    try:
        single = split_experts(weights, architecture)
        decoder = DecoderModel(architecture, model.config, generation, single, angles=_angles_of(model))
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"this {model.config.model_type} model does not have the weights of its config: {error}"
        ) from error
    vars(decoder).update({mark: noted for mark, noted in vars(model).items() if mark in _MARKS})
    return decoder


def _weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    num_layers = int(model.config.num_hidden_layers)
    tensors = []
    for name, tensor in model.state_dict().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < num_layers:
            tensors.append((name, tensor))
    return tensors


def _angles_of(model: PreTrainedModel) -> Callable[[int, str], tuple[Floats, Floats]]:
    """Return the angles of a model from its own rotary module."""

    def angles(num_positions: int, kind: str) -> tuple[Floats, Floats]:
        with torch.inference_mode():
            cos, sin = rotary_table(model, num_positions, torch.float32, kind)
        return as_array(cos), as_array(sin)

    return angles


def rotary_table(model: PreTrainedModel, num_positions: int, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin [num_positions, rotated channels] of a model's own rotary module, for halves of a head."""
    inner: Any = model.model
    architecture = architecture_of(model)
    assert architecture is not None
    like = inner.get_submodule(architecture.last_norm[0]).weight[None, None].to(dtype)
    positions = torch.arange(num_positions, device=like.device)[None]
    cos, sin = inner.get_submodule(architecture.rotary)(like, positions, *([kind] if kind else []))
    if architecture.turns_neighbours:  # such a module repeats each angle for neighbouring channels
        cos, sin = (torch.cat((table[..., ::2], table[..., ::2]), -1) for table in (cos, sin))
    if architecture.gives_angles_once:
        cos, sin = (torch.cat((table, table), -1) for table in (cos, sin))
    return cos[0].to(dtype), sin[0].to(dtype)
