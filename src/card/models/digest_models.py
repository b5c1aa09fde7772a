"""Small models of the kinds of layers that the built-in pair lacks, whose weights have no pattern and no source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from card.kernels.number_types import Floats
from card.models.architectures import Architecture, find_architecture
from card.models.architectures.architecture import sizes_of
from card.models.files.generation_config import GenerationConfig
from card.models.own.decoder_model import DecoderModel
from card.models.own.layer_inputs import LAYER_TABLE
from card.models.own.plain_config import config_of
from card.models.parts import Part

_SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 80,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_SINKS = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9, "initial_context_length": 64}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
_OWN_INPUTS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "global_head_dim": 64,
    "sliding_window": 9,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 512,
}
_CONFIGS: tuple[Mapping[str, Any], ...] = (
    {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 64},
    {"model_type": "gpt_oss", **_SINKS, "rope_parameters": _YARN},
    {"model_type": "lfm2_moe", **_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    {"model_type": "qwen3_5_text", **_DELTA},
    {"model_type": "gemma4_text", **_OWN_INPUTS},
)


def digest_models() -> Iterator[DecoderModel]:
    """Yield each model in float32, and in 8-bit integers."""
    for fields in _CONFIGS:
        architecture = find_architecture(fields["model_type"])
        assert architecture is not None
        config = config_of({**_SIZES, **fields, "architectures": [architecture.model_class]})
        assert config is not None, fields
        for computes_int8 in (False, True):
            model = DecoderModel(architecture, config, GenerationConfig(), dict(_weights(architecture, config)))
            model.computes_int8 = computes_int8
            yield model


def _weights(architecture: Architecture, config: Any) -> Iterator[tuple[str, Floats]]:
    """Yield all weights by transformers' names."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", _matrix(config.vocab_size, hidden)
    yield "lm_head.weight", _matrix(config.vocab_size, hidden)
    yield f"model.{architecture.last_norm[0]}.weight", _vector(hidden)
    if architecture.layer_inputs is not None:
        width = config.hidden_size_per_layer_input
        yield LAYER_TABLE, _matrix(config.vocab_size_per_layer_input, config.num_hidden_layers * width)
        yield "model.per_layer_model_projection.weight", _matrix(config.num_hidden_layers * width, hidden)
        yield "model.per_layer_projection_norm.weight", _vector(width)
    for idx in range(config.num_hidden_layers):
        shape = architecture.layer_shape(config, idx)
        sizes = sizes_of(config, shape)
        for part in architecture.parts_of(shape):
            lengths = [sizes[size] for size in part.shape]
            for name, weight in _part_weights(architecture, config, part, lengths):
                yield f"model.layers.{idx}.{name}", weight


def _part_weights(
    architecture: Architecture, config: Any, part: Part, shape: list[int]
) -> Iterator[tuple[str, Floats]]:
    """Yield the weight of a part of a layer, and its bias."""
    if part in architecture.vectors.values():
        yield part.name, _vector(*shape)
    elif len(shape) == 1:
        yield f"{part.name}.weight", _vector(*shape)
    elif part in architecture.filters:
        yield f"{part.name}.weight", _matrix(shape[0], shape[-1]).reshape(shape)
    else:
        yield f"{part.name}.weight", _matrix(*shape)
        if architecture.has_bias(part, config):
            yield f"{part.name}.bias", _vector(shape[0]) - np.float32(1)


def _matrix(num_rows: int, num_in: int) -> Floats:
    """Return a weight whose products with rows of length 1 are about as long."""
    return fixed_numbers(num_rows * num_in, num_rows).reshape(num_rows, num_in) * np.float32(2 / np.sqrt(num_in))


def _vector(count: int) -> Floats:
    """Return numbers near 1."""
    return np.float32(1) + fixed_numbers(count, 3 * count) / np.float32(8)


def fixed_numbers(count: int, first: int = 0) -> Floats:
    """Return numbers from -1 to 1 without a pattern that a group could share, made of whole numbers alone."""
    places = np.arange(first, first + count, dtype=np.int64)
    whole = (places * places * 7919 + 104729 * places) % 4093 - 2046
    return whole.astype(np.float32) / np.float32(2046)
