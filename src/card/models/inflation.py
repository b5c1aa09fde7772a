"""Cost inflation: the same function at a larger model's price, for honest timing without the larger model's weights.

The residual stream of the inflated model holds n copies of the original one. The mean that RMSNorm takes over n copies
is the mean over one, so its weight is repeated and nothing is compensated: the construction is exact for any n (up to
the order of floating-point sums). Embeddings and output projections write every copy, input projections and the output
head read the first. Added heads and MLP rows have zero columns in the output projections, added layers have output
projections of zero. What cannot reach the result is random, everything else that was added is zero.

The alternative, zeros in the added width, makes RMSNorm's mean n times too small: its weight then takes a factor
1/sqrt(n) and its epsilon 1/n, which floating point represents exactly only where n is a power of four.

Only the cost is inflated, not the quality. The config of an inflated model names its original.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from card.errors import ModelError, SettingsError, ShortageError, named
from card.kernels.number_types import Array, zeros
from card.machine.memory import free_memory, in_gigabytes, memory_in_words
from card.models.architectures.architecture import sizes_of
from card.models.by_transformers import torch_module
from card.models.facts import parameter_count
from card.models.loaded_model import LoadedModel
from card.models.names import model_name
from card.models.own.decoder_model import DecoderModel

TOLERANCE = 0.01  # largest relative difference between the parameters asked for and those made
_TABLE, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_MLP_MULTIPLES = (64, 8, 1)  # rounding of the MLP width: the coarsest that keeps the tolerance
_MOST_ADDED_LAYERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class InflatedShape:
    """Size of an inflated model."""

    copies: int  # n: its width over the original one, and its heads over the original ones
    layers: int
    mlp_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalSize:
    """Size of a model; of an inflated one: that of the model it was made from."""

    num_parameters: int
    num_layers: int
    hidden_size: int


def inflated_from(model: LoadedModel) -> int | None:
    """Return how many parameters the model had before it was inflated; None for a model that was not."""
    return getattr(model.config, "inflated_from", None)


def price_in_words(model: LoadedModel) -> str | None:
    """Return what an inflated model costs and what it is; None for a model as it is."""
    original = inflated_from(model)
    if original is None:
        return None
    return f"{parameter_count(model) / 1e6:.0f}M (inflated from {original / 1e6:.1f}M, same outputs)"


def original_size(model: LoadedModel) -> OriginalSize:
    """Return the size of the model that this one was inflated from; its own if it was not."""
    config = model.config.get_text_config()
    num_parameters = inflated_from(model)
    if num_parameters is None:
        return OriginalSize(
            num_parameters=parameter_count(model),
            num_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
        )
    return OriginalSize(
        num_parameters=num_parameters,
        num_layers=int(config.inflated_from_layers),
        hidden_size=int(config.inflated_from_hidden_size),
    )


def inflate(model: LoadedModel, num_parameters: int) -> LoadedModel:
    """Return a model with the same logits and about ``num_parameters``, in the same dtype and on the same device.

    The output head is no longer tied to the embeddings once the width grows; it counts.

    Raises: ModelError for another architecture than Llama; SettingsError if ``num_parameters`` is fewer than it has;
        ShortageError if memory holds fewer.
    """
    _require_llama(model)
    if num_parameters < parameter_count(model):
        raise SettingsError(
            f"an inflated model cannot be smaller than its original: asked for {num_parameters:,} parameters, "
            f"the model has {parameter_count(model):,}"
        )
    if (num_bytes := num_parameters * model.dtype.itemsize) > free_memory():
        raise ShortageError(
            f"there is not enough memory: {num_parameters:,} parameters take {in_gigabytes(num_bytes)}, "
            f"{memory_in_words()}; lower {named('target_cost')}"
        )
    return inflate_to_shape(model, choose_shape(model.config, num_parameters))


def choose_shape(config: Any, num_parameters: int) -> InflatedShape:
    """Return the shape, within 1 % of ``num_parameters``, that looks most like a model one would train at that size.

    That is: the MLP as wide against the residual stream as in the original, and layers growing with the cube root of
    the width. ``num_parameters`` is at least the original's.
    """
    width_ratio = config.intermediate_size / config.hidden_size

    def oddness(shape: InflatedShape) -> float:
        wanted_layers = config.num_hidden_layers * shape.copies ** (1 / 3)
        mlp_ratio = shape.mlp_width / (shape.copies * config.hidden_size)
        return abs(math.log(shape.layers / wanted_layers)) + 2 * abs(math.log(mlp_ratio / width_ratio))

    return min(_possible_shapes(config, num_parameters), key=oddness)


def count_parameters(config: Any, shape: InflatedShape) -> int:
    """Return how many parameters a Llama model of this config has once it is inflated to ``shape``."""
    hidden = config.hidden_size * shape.copies
    query = config.num_attention_heads * shape.copies * _head_dim(config)
    key_value = _num_key_value_heads(config) * shape.copies * _head_dim(config)
    attention = 2 * hidden * (query + key_value) + config.attention_bias * (query + 2 * key_value + hidden)
    mlp = 3 * hidden * shape.mlp_width + config.mlp_bias * (2 * shape.mlp_width + hidden)
    num_embeddings = 1 if _is_tied(config, shape) else 2
    return int((num_embeddings * config.vocab_size + 1) * hidden + shape.layers * (attention + mlp + 2 * hidden))


def inflate_to_shape(model: LoadedModel, shape: InflatedShape) -> LoadedModel:
    """Return a model of ``shape`` with the same logits, in the same dtype and on the same device.

    Raises: ModelError as `inflate`; SettingsError if the shape is smaller than the model.
    """
    _require_llama(model)
    config = model.config
    if shape.copies < 1 or shape.layers < config.num_hidden_layers or shape.mlp_width < config.intermediate_size:
        raise SettingsError(
            f"an inflated model needs copies of 1 or more, {config.num_hidden_layers} or more layers and "
            f"{named('mlp_width')} of {config.intermediate_size} or more, got {shape}"
        )
    if isinstance(model, DecoderModel):
        return _inflated(model, shape)
    remade: LoadedModel = torch_module("transformers.modules", "a model of transformers").remade(
        model, lambda llama: _inflated(llama, shape)
    )
    return remade


def _inflated(llama: DecoderModel, shape: InflatedShape) -> DecoderModel:
    config = _inflated_config(llama, shape)
    source = cast(dict[str, Array], dict(llama.weights))
    source.setdefault(_HEAD, source[_TABLE])  # of a model whose head is tied
    random = np.random.default_rng(0)
    weights = {
        name: _inflated_weight(name, source.get(name), size, shape.copies, llama, random)
        for name, size in _shapes(config, llama).items()
    }
    generation = copy.deepcopy(llama.generation_config)
    inflated = DecoderModel(llama.architecture, config, generation, weights, angles=llama.angles)
    inflated.computes_int8 = llama.computes_int8
    return inflated


def _shapes(config: Any, model: DecoderModel) -> dict[str, tuple[int, ...]]:
    """Return the weights that a Llama model of a config has, and their shapes."""
    architecture = model.architecture
    sizes = sizes_of(config, architecture.layer_shape(config, 0))
    shapes: dict[str, tuple[int, ...]] = {_TABLE: (config.vocab_size, config.hidden_size)}
    for idx, part in itertools.product(range(config.num_hidden_layers), architecture.parts):
        shape = tuple(sizes[size] for size in part.shape)
        shapes[f"model.layers.{idx}.{part.name}.weight"] = shape
        if len(shape) > 1 and architecture.has_bias(part, config):
            shapes[f"model.layers.{idx}.{part.name}.bias"] = shape[:1]
    shapes[_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = shapes[_TABLE]
    return shapes


def _require_llama(model: LoadedModel) -> None:
    if model.config.model_type != "llama":
        raise ModelError(f"only Llama models can be inflated, got {model_name(model)}; leave the inflation out")
    if isinstance(model, DecoderModel) and model.has_blocks:
        raise ModelError(f"the blocks of {model_name(model)} cannot be inflated; give it a dtype, such as bfloat16")


def _head_dim(config: Any) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _num_key_value_heads(config: Any) -> int:
    return int(config.num_key_value_heads or config.num_attention_heads)


def _is_tied(config: Any, shape: InflatedShape) -> bool:
    return bool(config.tie_word_embeddings) and shape.copies == 1  # n copies in the head would give n times the logits


def _possible_shapes(config: Any, num_parameters: int) -> Iterator[InflatedShape]:
    """Yield, for each width and depth, the shape whose MLP width comes closest, if it is within the tolerance."""
    most = num_parameters * (1 + TOLERANCE)
    depths = range(config.num_hidden_layers, config.num_hidden_layers + _MOST_ADDED_LAYERS + 1)
    for copies in itertools.count(1):
        for layers in depths:
            narrow = InflatedShape(copies=copies, layers=layers, mlp_width=config.intermediate_size)
            if count_parameters(config, narrow) > most:
                break
            yield from _widened(config, narrow, num_parameters)
        if layers == depths[0]:  # even the shallowest of this width was too large
            return


def _widened(config: Any, narrow: InflatedShape, num_parameters: int) -> list[InflatedShape]:
    """Return ``narrow`` with the MLP width that fits ``num_parameters``; empty if none is within the tolerance."""
    num_narrow = count_parameters(config, narrow)
    step = count_parameters(config, dataclasses.replace(narrow, mlp_width=narrow.mlp_width + 1)) - num_narrow
    exact = narrow.mlp_width + (num_parameters - num_narrow) / step
    for multiple in _MLP_MULTIPLES:
        shape = dataclasses.replace(narrow, mlp_width=max(narrow.mlp_width, multiple * round(exact / multiple)))
        if abs(count_parameters(config, shape) - num_parameters) <= TOLERANCE * num_parameters:
            return [shape]
    return []


def _inflated_config(model: DecoderModel, shape: InflatedShape) -> Any:
    config = copy.deepcopy(model.config)
    config.head_dim = _head_dim(config)
    config.hidden_size *= shape.copies
    config.num_attention_heads *= shape.copies
    config.num_key_value_heads = _num_key_value_heads(model.config) * shape.copies
    config.intermediate_size = shape.mlp_width
    config.num_hidden_layers = shape.layers
    config.tie_word_embeddings = _is_tied(model.config, shape)
    original = original_size(model)
    config.inflated_from = original.num_parameters
    config.inflated_from_layers = original.num_layers
    config.inflated_from_hidden_size = original.hidden_size
    return config


def _inflated_weight(
    name: str,
    source: Array | None,
    size: tuple[int, ...],
    copies: int,
    model: DecoderModel,
    random: np.random.Generator,
) -> Array:
    """Return the weight ``name`` of the inflated model; ``source`` is the original one, None in an added layer."""
    new, layer_part = zeros(size, model.dtype), name.split(".")[-2]
    if source is None:
        if "norm" in layer_part:
            new[...] = 1
        elif layer_part not in ("o_proj", "down_proj") and not name.endswith("bias"):  # those add nothing
            _fill_randomly(new, model.config.initializer_range, random)
        return new
    if "norm" in layer_part or (layer_part in ("o_proj", "down_proj") and name.endswith("bias")):
        return np.tile(source, copies)
    if layer_part == "embed_tokens":
        return np.tile(source, (1, copies))
    if layer_part in ("o_proj", "down_proj"):
        new[:, : source.shape[1]] = np.tile(source, (copies, 1))
        return new
    # What reads the residual stream: q, k, v, gate and up projections with their biases, and the output head.
    _fill_randomly(new[source.shape[0] :], model.config.initializer_range, random)
    new[tuple(slice(length) for length in source.shape)] = source
    return new


def _fill_randomly(part: Array, std: float, random: np.random.Generator) -> None:
    bound = np.float32(math.sqrt(3) * std)
    part[...] = (2 * random.random(part.shape, np.float32) - 1) * bound
