"""The config of a GGUF file's model in transformers' terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from card.kernels.number_types import BFLOAT16, FLOAT16, FLOAT32, Dtype, Floats
from card.kernels.rotation import LEAST_SETTING, PROPORTIONAL, attention_factor
from card.models.architectures import Architecture
from card.models.files.gguf.experts import check_router, stated_experts
from card.models.files.gguf.fused import has_bias
from card.models.files.gguf.header import DamagedError, GgufError, Header, TensorPlace
from card.models.files.gguf.keys import PERIOD, RECURRENT, GgufFacts
from card.models.files.gguf.tokenizer import end_ids, special_id
from card.models.files.gguf.weights import PLAIN_DTYPES, Weight, read_rows
from card.models.layer_shape import of_layer
from card.models.long_texts import LONG_ROPE

_KV_HEADS = "attention.head_count_kv"
ROPE_FACTORS = "rope_freqs.weight"  # how Llama 3.1 and later files store the scaling of their angles
_LONG_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # longrope's
ROTATION_TENSORS = frozenset({ROPE_FACTORS, *_LONG_FACTORS.values()})  # which are settings, not weights
_PATTERN = "attention.sliding_window_pattern"  # how many layers have one without a window, or whether each has one
_TURNED = "rope.dimension_count"  # channels of a head
_NORM_EPS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # of norms that subtract the mean
_STILL = 1e29  # divisors of angles from here on leave a channel as it is: files have 1e30
_LLAMA3_CONTEXT = 8192  # the length that those models were trained on first; no file tells it
_SCALE_TOLERANCE = 1e-5  # relative, of a scale that files store in 32 bits
_CONTEXT, _FIRST_CONTEXT = "original_max_position_embeddings", "rope.scaling.original_context_length"
# What yarn may state besides. The keys are llama.cpp's; its converter stores a config's fields in them as they are.
_YARN = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
}


_SAMPLING = "gguf_sampling"
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_SAMPLING_DIGITS = 6  # the file has single precision, its maker wrote decimals


def read_config(path: Path, header: Header, architecture: Architecture) -> dict[str, Any]:
    """Return the config. Raises: GgufError if it asks for more than is built here."""
    metadata = header.metadata
    facts = GgufFacts(metadata, header.architecture)
    facts.check(path, architecture)
    hidden, heads = facts.whole("embedding_length"), _heads(facts, architecture)
    head_dim = _head_dim(facts, hidden, of_layer(heads, 0), architecture)
    places = header.tensors
    if "token_embd.weight" not in places:
        raise GgufError("has no tensor token_embd.weight, so it holds no whole model")
    num_layers = facts.num_layers
    if num_layers > len(places):  # before a list of them is made
        raise DamagedError(f"damaged: it has {num_layers} layers, and {len(places)} tensors")
    ends = end_ids(metadata)
    stated = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        **_biases(places, architecture),
        **_scales(facts, architecture, head_dim),
        **{name: facts.cap(cap) for cap, name in architecture.caps.items()},
        **_windows(facts, architecture),
        "dtype": stored_dtype_of(header).name,
        "is_quantized": not _matrix_types(header) <= PLAIN_DTYPES.keys(),
        "matrix_types": sorted(_matrix_types(header)),
        "head_dim": head_dim,
        **_activation(architecture),
        "hidden_size": hidden,
        "intermediate_size": _mlp_width(facts),
        "max_position_embeddings": facts.whole("context_length"),
        **({_CONTEXT: _first_context(facts)} if _CONTEXT in architecture.config_fields.defaults else {}),
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers,
        **_kv_heads(facts, architecture, heads),
        **{name: facts.whole(key) for name, key in architecture.gguf_numbers.items()},
        architecture.norm_eps: facts.number(_NORM_EPS[architecture.centres]),
        "rope_parameters": _rotations(header, facts, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in places,
        "vocab_size": places["token_embd.weight"].shape[0],
        "bos_token_id": special_id(metadata, "bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": special_id(metadata, "padding"),
        _SAMPLING: _sampling(metadata),
    }
    stated |= {
        **architecture.gguf.constants,
        **architecture.gguf.fields(stated),
        **architecture.gguf.layers(facts, places, stated),
    }
    config = {**stated, **stated_experts(facts, architecture)}
    if architecture.gguf_experts:
        check_router(facts, architecture, config)
    return config


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what generation_config.json has: the tokens that begin and end a text, and how the maker samples."""
    return {**{name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}, **config[_SAMPLING]}


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling that a file states, under transformers' names. A file that states any samples."""
    stated = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    defaults = {
        name: round(value, _SAMPLING_DIGITS) if isinstance(value, float) else value
        for name, value in stated.items()
        if value is not None
    }
    return {**defaults, "do_sample": True} if defaults else {}


def _head_dim(facts: GgufFacts, hidden: int, heads: int, architecture: Architecture) -> int:
    """Return the size of a head. Raises: GgufError if a part of it has another one."""
    head_dim = facts.whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", *(() if architecture.turns_parts else (_TURNED,))):
        if (size := facts.whole(key, head_dim)) != head_dim:
            raise GgufError(
                f"has heads whose parts differ in size: {key} is {size}, not {head_dim}; use a folder saved by "
                "transformers"
            )
    return head_dim


def _mlp_width(facts: GgufFacts) -> int | list[int]:
    """Return the width of the MLPs; where all layers have experts alone, that of an expert."""
    key = "feed_forward_length"
    return facts.each_layer(f"expert_{key}" if facts.optional(key, None) is None else key)


def _heads(facts: GgufFacts, architecture: Architecture) -> int | list[int]:
    """Return the query heads; layers without attention may have none. Raises: GgufError if others have none."""
    stated = facts.each_layer("attention.head_count", least=0 if architecture.mixers else 1)
    held = {*stated} - {0} if isinstance(stated, list) else {stated}
    return held.pop() if len(held) == 1 else stated


def _kv_heads(facts: GgufFacts, architecture: Architecture, heads: int | list[int]) -> dict[str, Any]:
    """Return the KV heads, and the kinds of layers where some have none. Raises: GgufError if others differ."""
    if facts.optional(_KV_HEADS, None) is None:
        return {"num_key_value_heads": heads}
    if not architecture.mixers:
        return {"num_key_value_heads": facts.each_layer(_KV_HEADS)}
    (without,), stated = architecture.mixers, facts.each_layer(_KV_HEADS, least=0)
    attends = _attending(facts, architecture)
    of_layers = stated if isinstance(stated, list) else [stated] * facts.num_layers
    if len(counts := set(of_layers) - {0}) != 1:
        raise GgufError(f"has layers of {sorted(counts)} KV heads, which is not known here; use the model's folder")
    kinds = ["full_attention" if one else without for one in attends or of_layers]
    return {"num_key_value_heads": counts.pop(), "layer_types": kinds}


def _attending(facts: GgufFacts, architecture: Architecture) -> list[bool] | None:
    """Return which layers attend; None if those do that have KV heads."""
    if not architecture.gguf.period:
        return None
    stated = facts.of_layers(RECURRENT)
    if stated is not None:
        return [not one for one in stated]
    period = facts.whole(PERIOD, architecture.gguf.period)
    return [layer % period == 0 for layer in range(1, facts.num_layers + 1)]


def _activation(architecture: Architecture) -> dict[str, str]:
    """Return the field of the config that names the gate's activation, which no file states."""
    name = architecture.activation
    return {} if name is None else {name: architecture.config_fields.defaults[name]}


def _biases(places: Mapping[str, TensorPlace], architecture: Architecture) -> dict[str, bool]:
    """Return the fields of the config that say which layers have biases, by what the file holds."""
    held = {architecture.stated_bias(part) for part in architecture.linears if has_bias(places, part.gguf_name)}
    return {stated: stated in held for stated in architecture.biases.values() if isinstance(stated, str)}


def _scales(facts: GgufFacts, architecture: Architecture, head_dim: int) -> dict[str, float]:
    """Return the fields of the config with factors. Raises: GgufError if attention has one that it has no field for."""
    usual = head_dim**-0.5
    scale = facts.factor("attention", usual)
    if "attention" not in architecture.scales and not math.isclose(scale, usual, rel_tol=_SCALE_TOLERANCE):
        raise GgufError(f"asks for attention.scale {scale}, not {usual:.4g}; use a folder saved by transformers")
    fields = {one: name for one, name in architecture.scales.items() if isinstance(name, str)}
    return {name: scale if one == "attention" else facts.factor(one, 1.0) for one, name in fields.items()}


def _windows(facts: GgufFacts, architecture: Architecture) -> dict[str, Any]:
    """Return the window, and the kind of each layer if the file states it. Raises: GgufError if there may be none."""
    window, pattern = facts.optional("attention.sliding_window", 0), facts.optional(_PATTERN, None)
    if not architecture.has_windows:
        if window:
            raise GgufError(
                f"has a sliding window, which {architecture.gguf.name} models have not here; use a folder saved by "
                "transformers"
            )
        return {}
    window_fields: dict[str, Any] = {"sliding_window": facts.whole("attention.sliding_window")} if window else {}
    if pattern is not None:
        layers, has_window = range(1, facts.num_layers + 1), facts.of_layers(_PATTERN)
        has_window = has_window or [layer % facts.whole(_PATTERN) for layer in layers]
        window_fields["layer_types"] = ["sliding_attention" if one else "full_attention" for one in has_window]
    return window_fields


def _rotations(
    header: Header, facts: GgufFacts, architecture: Architecture, head_dim: int
) -> dict[str, dict[str, Any]] | dict[str, Any]:
    """Return the settings of the angles, once for each kind of layer where layers with a window have their own."""
    rope, thetas = rope_of(header, facts, head_dim), architecture.config_fields.theta
    if architecture.turns_parts and rope["rope_type"] != PROPORTIONAL:
        turned = facts.whole(_TURNED, head_dim)
        if turned > head_dim or turned % 2:
            raise DamagedError(f"damaged: {turned} channels of heads of {head_dim} turn")
        part = turned / head_dim
        rope["partial_rotary_factor"] = part if int(head_dim * part) == turned else math.nextafter(part, 1.0)
    if not isinstance(thetas, Mapping):
        return rope
    theta = facts.number("rope.freq_base_swa", thetas["local"], least=LEAST_SETTING)
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def rope_of(header: Header, facts: GgufFacts, head_dim: int) -> dict[str, Any]:
    """Return the settings of the angles. Raises: GgufError if they ask for more than is built here."""
    theta = facts.number("rope.freq_base", 10000.0, least=LEAST_SETTING)
    kind = facts.optional("rope.scaling.type", "linear")  # what llama.cpp takes for granted
    if not header.tensors.keys().isdisjoint(_LONG_FACTORS.values()):  # some of these files name no type
        return _longrope(header, facts, theta, head_dim)
    if kind not in ("none", "linear", "yarn") or facts.optional("rope.scaling.attn_factor", 1) != 1:
        raise GgufError(
            f"scales its angles by {str(kind)[:40]}, which is not read from such GGUF files; use the model's folder"
        )
    stated = [key for key in ("rope.scaling.factor", "rope.scale_linear") if facts.optional(key, None) is not None]
    if kind != "none" and stated and facts.optional(stated[0], 0) not in (0, 1):  # 0 means none, as 1 does
        if ROPE_FACTORS in header.tensors:
            raise GgufError(f"scales its angles twice, by {stated[0]} and by {ROPE_FACTORS}; use the model's folder")
        rope = {"rope_theta": theta, "factor": facts.number(stated[0], least=LEAST_SETTING)}
        return _yarn(facts, rope) if kind == "yarn" else {"rope_type": "linear", **rope}
    if ROPE_FACTORS not in header.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = _factors(header, ROPE_FACTORS)
    if (factors == 1).all():
        return {"rope_type": "default", "rope_theta": theta}
    if (num_turning := int((factors == 1).sum())) and (factors[num_turning:] >= _STILL).all():
        return {"rope_type": PROPORTIONAL, "rope_theta": theta, "partial_rotary_factor": num_turning / len(factors)}
    factor = float(factors.max())
    if factors.shape != (head_dim // 2,) or not np.allclose(factors, _llama3_factors(theta, head_dim, factor)):
        return _slowed(theta, factors, head_dim, facts)
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        _CONTEXT: _LLAMA3_CONTEXT,
    }


def _slowed(theta: float, factors: Floats, head_dim: int, facts: GgufFacts) -> dict[str, Any]:
    """Return angles of which each is slowed down by a factor of its own. Raises: GgufError if they do not fit."""
    turned = facts.whole(_TURNED, head_dim)
    if factors.shape != (turned // 2,) or not ((factors > 0) & np.isfinite(factors)).all():
        raise GgufError(f"has {len(factors)} factors of angles ({ROPE_FACTORS}), it must have {turned // 2}, above 0")
    numbers = [float(one) for one in factors]
    return {
        "rope_type": "longrope",  # of which no text here is long
        "rope_theta": theta,
        "short_factor": numbers,
        "long_factor": numbers,
        "attention_factor": 1.0,
        "original_max_position_embeddings": facts.whole("context_length"),
    }


def _yarn(facts: GgufFacts, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return yarn's settings, with a base and a factor that are known. Raises: GgufError if it is another yarn."""
    if facts.optional("rope.scaling.yarn_ext_factor", 1) != 1:
        raise GgufError("scales its angles by yarn in part (yarn_ext_factor); use the model's folder")
    stated = {
        field: facts.number(key, least=LEAST_SETTING) for field, key in _YARN.items() if facts.optional(key, 0) != 0
    }
    if "mscale_all_dim" in stated:
        stated["mscale"] = 1.0  # which no file states
    known = {"rope_type": "yarn", **rope, _CONTEXT: _first_context(facts), **stated}
    return _with_growth(known, facts, "rope.scaling.yarn_attn_factor")


def _longrope(header: Header, facts: GgufFacts, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings of angles with one list of factors for short texts and one for long ones."""
    lists, num_pairs = {}, facts.whole(_TURNED, head_dim) // 2
    for field, name in _LONG_FACTORS.items():
        if name not in header.tensors:
            raise GgufError(f"is incomplete: its tensor {name} is missing; copy or download it again")
        lists[field] = [float(str(factor)) for factor in _factors(header, name)]
        if len(lists[field]) != num_pairs:
            raise DamagedError(f"damaged: it has {len(lists[field])} factors in {name}, and {num_pairs} pairs turn")
        if not all(LEAST_SETTING <= factor < math.inf for factor in lists[field]):
            raise DamagedError(f"damaged: a factor in {name} is no finite number above 0")
    if (context := _first_context(facts)) == 1:
        raise DamagedError(f"damaged: its {_FIRST_CONTEXT} is 1")
    known = {"rope_type": LONG_ROPE, "rope_theta": theta, _CONTEXT: context, **lists}
    return _with_growth(known, facts, "rope.scaling.attn_factor")


def _with_growth(rope: dict[str, Any], facts: GgufFacts, key: str) -> dict[str, Any]:
    """Return settings with what cosines and sines are multiplied by, unless it is what follows from them anyway."""
    if facts.optional(key, None) is None:
        return rope
    stated, usual = facts.number(key, least=LEAST_SETTING), attention_factor(rope, facts.whole("context_length"))
    return rope if math.isclose(stated, usual, rel_tol=_SCALE_TOLERANCE) else {**rope, "attention_factor": stated}


def _first_context(facts: GgufFacts) -> int:
    """Return the length of the texts that the model was trained on first."""
    return facts.whole(_FIRST_CONTEXT, facts.whole("context_length"))


def _factors(header: Header, name: str) -> Floats:
    """Return a tensor by whose numbers angles are divided, float32."""
    numbers: Floats = np.concatenate(list(read_rows(Weight(name, header.tensors[name], None), FLOAT32)))
    return numbers


def _llama3_factors(theta: float, head_dim: int, factor: float) -> Floats:
    """Return by how much Llama 3.1 slows each angle down: fast ones not at all, slow ones by ``factor``."""
    lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = ((_LLAMA3_CONTEXT / lengths - 1) / 3).clip(0, 1)  # 1 and 4 are the two frequencies that it goes between
    slowed: Floats = (1 / ((1 - share) / factor + share)).astype(np.float32)
    return slowed


def _matrix_types(header: Header) -> set[int]:
    """Return what ggml calls the types of the weights but norms and biases, which are in float32 in every file."""
    return {place.type_id for place in header.tensors.values() if len(place.shape) > 1}


def stored_dtype_of(header: Header) -> Dtype:
    """Return what the weights are in; bfloat16 for quantised ones."""
    types = _matrix_types(header)
    if not types <= PLAIN_DTYPES.keys():
        return BFLOAT16
    for dtype in (BFLOAT16, FLOAT16):
        if dtype in {PLAIN_DTYPES[one] for one in types}:
            return dtype
    return FLOAT32
