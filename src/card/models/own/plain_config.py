"""Configs of plain decoders, which our own pass runs: nothing in them asks for more than is built here."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from card.kernels.number_types import STORED_DTYPES
from card.kernels.rotation import LEAST_SETTING, PROPORTIONAL, WITH_ALPHA
from card.models.architectures import Architecture, find_architecture
from card.models.architectures.architecture import ACTIVATIONS, rotary_parameters, rotary_size
from card.models.decoder_config import DecoderConfig
from card.models.files.scaled_weights import unquantized
from card.models.files.weight_files import raw_config
from card.models.inner_text import inner_config
from card.models.layer_kinds import WITH_WINDOW
from card.models.layer_shape import Experts, LayerShape
from card.models.long_texts import LONG_ROPE
from card.models.own.mxfp4_experts import without_mxfp4

_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {  # and the numbers that each needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    LONG_ROPE: ("original_max_position_embeddings",),
    PROPORTIONAL: (),
    WITH_ALPHA: ("alpha",),
}
_MAY_STATE = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # numbers, or None
_UNUSUAL = frozenset({"quantization_config", "auto_map", "text_config"})  # fields of what is not built here
_PARTIAL = "partial_rotary_factor"
# Folders with code of their own for what other models have: their model_type and class, and whose layers these are.
# Source: XiaomiMiMo/MiMo-7B-Base, modeling_mimo.py: Qwen2 with blocks that draft.
_LIKE: Mapping[tuple[str, ...], str] = {("mimo", "MiMoForCausalLM"): "qwen2"}
_STATED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def read_config(folder: Path, *, is_scaled: bool = False) -> DecoderConfig | None:
    """Return the config of a plain decoder; None if it cannot be read or is unusual, which transformers knows about.

    Args:
        is_scaled: its weights are made of 8-bit floats when they are read, so that they are as any others then.
    """
    raw = raw_config(folder)
    if is_scaled and isinstance(raw, dict):
        raw = unquantized(raw)
    return config_of({**inner_config(_as_known(raw)), "name_or_path": str(folder)}) if isinstance(raw, dict) else None


def _as_known(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json has, as the architecture says it whose layers the model has."""
    classes = raw.get("architectures")
    known = _LIKE.get((str(raw.get("model_type")), *map(str, classes))) if isinstance(classes, list) else None
    architecture = find_architecture(known)
    if architecture is None:
        return raw
    stated = {name: value for name, value in raw.items() if name != "auto_map"}
    return {**stated, "model_type": known, "architectures": [architecture.model_class]}


def config_of(raw: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the config of a plain decoder from what config.json has; None if it is unusual."""
    architecture = find_architecture(raw.get("model_type"))
    if architecture is None:
        return None
    raw = without_mxfp4(raw, architecture)
    if raw.get("architectures") != [architecture.model_class] or _UNUSUAL & raw.keys():
        return None
    if _PARTIAL in raw and not architecture.turns_parts:
        return None
    older, num_layers = architecture.config.older_names, raw.get("num_hidden_layers")
    stated = (*_STATED, architecture.config.width)
    if not all(_is_whole(raw.get(older.get(size, size), raw.get(size)), num_layers) for size in stated):
        return None
    try:
        fields = copy.deepcopy(dict(raw))  # the settings of the rotary embedding are written to
        del fields["model_type"]
        config = architecture.make_config(**fields)
        return config if _is_plain(config, architecture) else None
    except Exception:  # a wrong value may raise anything; transformers tells what is wrong
        return None


def config_of_block(config: DecoderConfig, architecture: Architecture) -> DecoderConfig:
    """Return the config of the block that drafts, as a model of one layer: it attends, and has experts if some do."""
    block = copy.copy(config)
    block.num_hidden_layers, block.layer_types = 1, ["full_attention"]
    if architecture.experts is not None and architecture.experts.first is not None:
        setattr(block, architecture.experts.first, 0)
    return block


def least_state_bytes(config: DecoderConfig) -> int:
    """Return the least memory of what layers without attention keep of a sequence, in 32 bits."""
    architecture = find_architecture(config.model_type)
    assert architecture is not None
    shapes = (architecture.layer_shape(config, idx) for idx in range(config.num_hidden_layers))
    return sum(4 * shape.state_size(config.hidden_size) for shape in shapes)


def _is_plain(config: DecoderConfig, architecture: Architecture) -> bool:
    """Return whether nothing in a config asks for more than is built here."""
    return (
        all(isinstance(size, int) and size > 0 for size in (config.hidden_size, config.num_hidden_layers))
        and config.vocab_size > 0
        and all(_is_plain_layer(architecture.layer_shape(config, idx)) for idx in range(config.num_hidden_layers))
        and config.max_position_embeddings > 0
        and getattr(config, architecture.norm_eps) > 0
        and architecture.gate_activation(config) in ACTIVATIONS
        and config.dtype in STORED_DTYPES
        and _has_known_layers(config, architecture)
        and architecture.refusal(config) is None
        and isinstance(config.rope_parameters, dict)
        and set(architecture.rotary_kinds(config)) <= {None, *rotary_parameters(config)}
        and all(_is_known_rotation(one, architecture) for one in rotary_parameters(config).values())
        and _has_fitting_lists(config, architecture)
    )


def _is_whole(stated: object, num_layers: object) -> bool:
    """Return whether a size is stated, for all layers or for each of them."""
    if isinstance(stated, list):
        return len(stated) == num_layers and all(isinstance(one, int) for one in stated)
    return isinstance(stated, int)


def _is_plain_layer(shape: LayerShape) -> bool:
    sizes = [shape.num_heads, shape.num_kv_heads, shape.head_size]
    sizes += [shape.num_taps] if shape.mixer != "attention" else []
    if shape.delta is not None:
        sizes += [shape.delta.num_keys, shape.delta.num_values, shape.delta.key_size, shape.delta.value_size]
    return (
        min(sizes) > 0
        and shape.num_heads % shape.num_kv_heads == 0
        and shape.head_size % 2 == 0
        and (shape.mlp_width > 0 if shape.experts is None else _are_plain(shape.experts) and shape.mlp_width >= 0)
        and shape.input_width >= 0
    )


def _are_plain(experts: Experts) -> bool:
    return 0 < experts.chosen <= experts.count and experts.width > 0 and experts.shared_width >= 0


def _has_known_layers(config: DecoderConfig, architecture: Architecture) -> bool:
    """Return whether each layer attends to all tokens before it, or to those of a window that the entry knows of."""
    stated = config.layer_types
    kinds = {"full_attention"} if stated is None else set(stated) - architecture.mixers.keys()
    if stated is not None and len(stated) != config.num_hidden_layers:
        return False
    if not architecture.has_windows:
        return not config.sliding_window and kinds <= {"full_attention"}
    window = config.sliding_window
    return (
        kinds <= {"full_attention"} | WITH_WINDOW
        and (window > 0 if window is not None else not kinds & WITH_WINDOW)
        and getattr(config, "use_bidirectional_attention", None) in (None, False, "vision")  # where texts have none
    )


def _is_known_rotation(rope: Mapping[str, Any], architecture: Architecture) -> bool:
    part = rope.get(_PARTIAL, 1.0)
    return (
        rope["rope_type"] in _ROPE_TYPES
        and (rope["rope_type"] != WITH_ALPHA or architecture.scales_bases)
        and all(_is_above_zero(rope.get(name)) for name in ("rope_theta", *_ROPE_TYPES[rope["rope_type"]]))
        and (rope["rope_type"] != "llama3" or rope["low_freq_factor"] < rope["high_freq_factor"])
        and all(rope.get(name) is None or _is_above_zero(rope[name]) for name in _MAY_STATE)
        and (rope["rope_type"] != "yarn" or _is_known_yarn(rope))
        and (rope["rope_type"] != LONG_ROPE or _has_lists(rope))
        and (_PARTIAL not in rope or architecture.turns_parts)
        and isinstance(part, int | float)
        and 0 < part <= 1
    )


def _is_known_yarn(rope: Mapping[str, Any]) -> bool:
    """Return whether channels turn ever slower, as they do unless all powers of the base are alike."""
    return isinstance(rope.get("truncate", True), bool) and rope["rope_theta"] != 1


def _has_lists(rope: Mapping[str, Any]) -> bool:
    """Return whether longrope's factors are numbers, and the length where the others set in can have a logarithm."""
    lists = rope.get("short_factor"), rope.get("long_factor")
    length = rope["original_max_position_embeddings"]
    return (
        all(isinstance(one, list) and all(map(_is_above_zero, one)) for one in lists)
        and isinstance(length, int)
        and length > 1
    )


def _has_fitting_lists(config: DecoderConfig, architecture: Architecture) -> bool:
    """Return whether longrope has a factor for each pair of channels that turn together, in all layers."""
    ropes = rotary_parameters(config)
    for layer, kind in enumerate(architecture.rotary_kinds(config)):
        if kind is None or ropes[kind]["rope_type"] != LONG_ROPE:
            continue
        pairs = rotary_size(config, kind, architecture.layer_shape(config, layer).head_size) // 2
        if {len(ropes[kind][name]) for name in ("short_factor", "long_factor")} != {pairs}:
            return False
    return True


def _is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST_SETTING <= value < math.inf
