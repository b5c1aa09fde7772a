"""Models in GGUF files, llama.cpp's format: config and weights in transformers' terms.

Architectures whose entry has llama.cpp's name are read; files that ask for more than is built here are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from card.errors import named as setting_named
from card.kernels.number_types import Array, Dtype
from card.models.architectures import Architecture, all_architectures
from card.models.decoder_config import DecoderConfig
from card.models.files.generation_config import GenerationConfig
from card.models.files.gguf.config import ROTATION_TENSORS, read_config
from card.models.files.gguf.experts import expert_weights
from card.models.files.gguf.fused import cut_fused
from card.models.files.gguf.header import DamagedError, GgufError, Header, TensorPlace, read_header
from card.models.files.gguf.joined import joined_weights
from card.models.files.gguf.keys import SHARED_WIDTH, WINDOW, GgufFacts
from card.models.files.gguf.parts import check_is_first, joined, named, read_parts
from card.models.files.gguf.relatives import RELATIVES
from card.models.files.gguf.weights import (
    Untiled,
    Weight,
    are_equal,
    check_tensors,
    read_raw,
    read_rows,
    read_untiled,
)
from card.models.layer_shape import head_dim
from card.models.own.decoder_model import DecoderModel
from card.models.own.plain_config import config_of, config_of_block
from card.models.parts import Part
from card.models.rows.row_tree import IntArray

_OUTSIDE = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_JOIN = ".nextn.eh_proj.weight"
_KEPT = ("d2t", "d2t.weight")  # of the tokens that a head of fewer outputs is for
_WHOLE_NUMBERS = {26: "<i4", 27: "<i8"}  # of ggml's types
_LAYER = re.compile(r"^blk\.\d+\.")
_NEXTN = {  # of a block that drafts, beside its layer
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # of the model's, which are not read
_LAYER_INPUTS = {  # of tokens' numbers for each layer
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model whose header has been found to be that of one that can be run."""

    header: Header  # of all parts
    config: Mapping[str, Any]  # as config.json has it; its dtype is that of the file, bfloat16 for a quantised one
    weights: Sequence[Weight]  # in terms of files, see `Architecture.as_stored`

    @property
    def folder_weights(self) -> Sequence[Weight]:
        """The weights, or parts of them, that make up those of a folder, under its names."""
        return joined_weights(self.weights, self.config)

    @property
    def num_elements(self) -> int:
        """Number of elements of the weights."""
        return sum(math.prod(weight.place.shape) for weight in self.weights)

    def read(self, weight: Weight, dtype: Dtype) -> Iterator[Array]:
        """Yield a weight, some rows at a time. Raises: GgufError if the file has become shorter."""
        yield from read_untiled(weight, dtype)

    def read_tiled(self, weight: Weight, dtype: Dtype) -> Iterator[Array]:
        """Yield a weight as `read` does, with its heads in the file's order."""
        yield from read_rows(weight, dtype)

    def read_raw(self, weight: Weight, first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return ``count`` rows of a weight as the file has them, [count, bytes], in the model's order.

        Raises: GgufError if the file has become shorter.
        """
        return read_raw(weight, first, count)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a model, before its weights are named."""

    header: Header  # of all parts, without the layers that draft
    drafting: Sequence[TensorPlace]  # the tensors of these layers
    architecture: Architecture  # as the file stores it
    config: dict[str, Any]
    plain: DecoderConfig
    is_block_alone: bool = False  # it has no layer but the one that drafts, of which the config then tells
    kept: TensorPlace | None = None  # ids of the tokens that a block proposes

    @property
    def has_block(self) -> bool:
        """Return whether there is a block that drafts."""
        return any(place.name.endswith(_JOIN) for place in self.drafting)


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a file, or of all parts of a model by the first one. Raises: GgufError, OSError."""
    first = read_header(path)
    check_is_first(path, first)
    known, headers = _architecture(first), read_parts(path, first)
    facts = GgufFacts(first.metadata, first.architecture)
    drafting = [place for one in headers.values() for name, place in one.tensors.items() if facts.is_behind(name)]
    headers = {file: _without_drafter(one, facts) for file, one in headers.items()}
    has_layers = any(name.startswith("blk.") for one in headers.values() for name in one.tensors)
    is_alone = bool(drafting) and not has_layers and len(headers) == 1
    head: TensorPlace | None = None
    if is_alone:
        (one,) = headers.values()
        head = next((one.tensors[name] for name in _KEPT if name in one.tensors), None)
        headers = {path: _of_one_layer(one, drafting)}
    for file, one in headers.items():
        with named(file, path):
            check_tensors(one)
    header = joined(headers)
    architecture = known.as_stored(header.tensors)
    config = read_config(path, header, architecture)
    plain = config_of(config)
    if plain is None:
        raise GgufError("has sizes of heads or layers that do not fit each other; use a folder saved by transformers")
    return GgufHeader(header, drafting, architecture, config, plain, is_alone, head)


def _of_one_layer(header: Header, drafting: Sequence[TensorPlace]) -> Header:
    """Return the header of a file that holds a block alone as that of a model of one layer."""
    begin = f"{header.architecture}."
    count = header.metadata[f"{begin}block_count"]
    stated = {
        key: value[-1:] if key.startswith(begin) and isinstance(value, list) and len(value) == count else value
        for key, value in header.metadata.items()
    }
    stated |= {f"{begin}block_count": 1, f"{begin}nextn_predict_layers": 0}
    layer = {_LAYER.sub("blk.0.", place.name): place for place in drafting if ".nextn." not in place.name}
    ends = {name: place for name, place in header.tensors.items() if name not in _KEPT}
    return replace(header, metadata=stated, tensors={**ends, **layer})


def read_kept_ids(read: GgufHeader) -> IntArray | None:
    """Return the ids of the tokens that a block alone in its file proposes; None for all. Raises: GgufError."""
    place, num_tokens = read.kept, int(read.config["vocab_size"])
    if place is None:
        return None
    if place.type_id not in _WHOLE_NUMBERS or len(place.shape) != 1:
        raise DamagedError(f"damaged: its tensor {place.name} is no list of whole numbers")
    with place.file.open("rb") as stream:
        stream.seek(place.offset)
        dtype = np.dtype(_WHOLE_NUMBERS[place.type_id])
        data = stream.read(min(place.shape[0], num_tokens + 1) * dtype.itemsize)
    ids: IntArray = np.frombuffer(data, dtype, len(data) // dtype.itemsize).astype(np.int64)
    head = read.header.tensors.get("output.weight")
    length = len(ids) if head is None else head.shape[0]
    if len(ids) != place.shape[0] or len(ids) != length or not length:
        raise DamagedError(f"damaged: {place.name} has {place.shape[0]} ids, and its head {length} outputs")
    if ids.min() < 0 or ids.max() >= num_tokens:
        raise DamagedError(f"damaged: {place.name} has ids from {ids.min()} to {ids.max()}, of {num_tokens} tokens")
    if len(np.unique(ids)) < len(ids):
        raise DamagedError(f"damaged: {place.name} has an id twice")
    return ids


def block_of(read: GgufHeader) -> GgufModel | None:
    """Return the block that drafts, with its weights under a folder's names; None if there is none.

    Raises: GgufError if there are several, or it has a head or embeddings of its own.
    """
    if not read.has_block:
        return None
    begins = {place.name.partition(".nextn.")[0] for place in read.drafting if place.name.endswith(_JOIN)}
    if len(begins) > 1:
        raise GgufError(f"holds {len(begins)} blocks that draft, and one is run here; name a draft model")
    check_tensors(replace(read.header, tensors={place.name: place for place in read.drafting}))
    plain, config = config_of_block(read.plain, read.architecture), read.config
    (begin,) = begins
    weights: list[Weight] = []
    for place in read.drafting:
        name = place.name.removeprefix(f"{begin}.")
        if name in _COPIES:
            continue
        if name in _NEXTN:
            offset = read.architecture.norm_offset if len(place.shape) == 1 else 0.0
            weights.append(Weight(f"mtp.{_NEXTN[name]}", place, None, offset))
            continue
        if name.startswith("nextn."):
            raise GgufError(f"holds a block with a tensor {place.name}, which is not known here; name a draft model")
        one = replace(place, name=f"blk.0.{name}")
        try:
            read_weights = expert_weights(one, read.architecture, config) or [_weight(one, read.architecture, plain)]
        except GgufError as error:
            raise type(error)(str(error).replace(one.name, place.name)) from None
        weights += [replace(weight, name=weight.name.replace("model.", "mtp.", 1)) for weight in read_weights]
    if all(weight.name != "mtp.norm.weight" for weight in weights):  # the model's own norm stands for it
        norm = read.header.tensors[f"{read.architecture.last_norm[1]}.weight"]
        weights.append(Weight("mtp.norm.weight", norm, None, read.architecture.norm_offset))
    return GgufModel(read.header, config, weights)


def block_in_words(words: str, layer: int, architecture: Architecture) -> str:
    """Return words about a tensor of a block, which have its name of Qwen3.5's folders, with the one of GGUF files."""
    begin = f"blk.{layer}."
    for own, name in _NEXTN.items():
        words = words.replace(f"mtp.{name}", begin + own)
    for part in sorted(architecture.parts, key=lambda one: -len(one.name)):
        of_experts = re.escape(part.name).replace(r"\{\}", r"\d+")
        words = re.sub(rf"mtp\.layers\.0\.{of_experts}(?!\w)", begin + part.gguf_name, words)
    return words


def open_gguf(path: Path) -> GgufModel:
    """Read the header of a file, or of all parts of a model by the first one, and check that the model can be run.

    Raises: GgufError if it cannot; OSError if a file cannot be read.
    """
    return model_of(read_gguf(path))


def model_of(read: GgufHeader) -> GgufModel:
    """Return the model, without a block that drafts; errors as of `open_gguf`."""
    if read.is_block_alone:
        raise GgufError(f"holds a block that drafts, and no model; give it as {setting_named('draft')} of its target")
    header, architecture, config, plain = read.header, read.architecture, read.config, read.plain
    places = [place for place in header.tensors.values() if place.name not in ROTATION_TENSORS]
    places = cut_fused(places, architecture, plain)
    weights = [
        weight
        for place in places
        for weight in expert_weights(place, architecture, config) or [_weight(place, architecture, plain)]
    ]
    unread = _unread(architecture, plain)
    weights = [weight for weight in weights if weight.name not in unread]
    _check_weights(weights, architecture, plain)
    by_name = {weight.name: weight for weight in weights}
    head = by_name.get("lm_head.weight")
    if head is not None and are_equal(head, by_name["model.embed_tokens.weight"]):
        weights.remove(head)
        config["tie_word_embeddings"] = True
    return GgufModel(header, config, weights)


def _architecture(header: Header) -> Architecture:
    """Return what the model is made of. Raises: GgufError if it is no model, or of an architecture not known here."""
    if (kind := header.metadata.get("general.type", "model")) != "model":
        raise GgufError(f"holds no model but the type {str(kind)[:40]}; give the file of the model itself")
    known = [one for one in all_architectures() if one.gguf.name]
    candidates = [one for one in known if header.architecture in one.gguf.names]
    if not candidates:
        names, relative = (
            dict.fromkeys(name for one in known for name in one.gguf.names),
            RELATIVES.get(header.architecture),
        )
        instead = f"use a folder saved by transformers (its {relative} runs)" if relative else "try its folder"
        raise GgufError(
            f"holds a model of the architecture {header.architecture[:40] or 'unknown'}, which is not read from GGUF "
            f"files: {instead}; those of {', '.join(names)} are read"
        )
    candidates.sort(key=lambda one: one.gguf.name != header.architecture)
    asked: tuple[tuple[str, Callable[[Architecture], bool]], ...] = (
        ("expert_count", lambda one: bool(one.gguf_experts)),
        (SHARED_WIDTH, lambda one: SHARED_WIDTH in one.gguf_experts.values()),
        (WINDOW, lambda one: one.has_windows),
    )
    for key, has_it in asked:  # the ones that have what the file states, as long as there are any
        is_stated = bool(header.metadata.get(f"{header.architecture}.{key}"))
        candidates = [one for one in candidates if has_it(one) == is_stated] or candidates
    return candidates[0]


def _without_drafter(header: Header, facts: GgufFacts) -> Header:
    """Return a header without the layers that draft, which no pass here runs."""
    tensors = {name: place for name, place in header.tensors.items() if not facts.is_behind(name)}
    return replace(header, tensors=tensors)


def _weight(place: TensorPlace, architecture: Architecture, config: DecoderConfig) -> Weight:
    """Return what a tensor of the file becomes."""
    stem, _, kind = place.name.rpartition(".")
    own_norm, gguf_norm = architecture.last_norm
    of_inputs = {} if architecture.layer_inputs is None else _LAYER_INPUTS
    outside = {**_OUTSIDE, **of_inputs, gguf_norm: f"model.{own_norm}"}.get(stem)
    is_norm = len(place.shape) == 1 and kind == "weight"
    offset = architecture.norm_offset if is_norm else 0.0
    if outside is not None:
        return Weight(f"{outside}.{kind}", place, None, offset)
    if (vector := _vector(place, architecture, config)) is not None:
        return vector
    prefix, _, name = stem.partition(".")[2].partition(".")
    parts = {one.gguf_name: one for one in reversed(architecture.parts)}
    part = parts.get(f"{name}.{kind}") or parts.get(name)
    if not stem.startswith("blk.") or part is None:
        raise GgufError(f"has a tensor {place.name}, which is not known here; use a folder saved by transformers")
    if part in architecture.filters:
        place = replace(place, shape=(place.shape[0], 1, *place.shape[1:]))  # as folders have it
    is_paired = architecture.gguf.pairs and name in ("attn_q", "attn_k")
    order = row_order(place.shape[0], head_dim(config)) if is_paired else None
    if part is architecture.norms.get("delta_out"):
        offset = 0.0
    untiled = _untiled(part, architecture, config)
    return Weight(f"model.layers.{prefix}.{part.name}.{kind}", place, order, offset, untiled=untiled)


def _untiled(part: Part, architecture: Architecture, config: DecoderConfig) -> Untiled | None:
    """Return how the model has a part whose value heads files have in another order; None for as they are."""
    shapes = (architecture.layer_shape(config, idx).delta for idx in range(config.num_hidden_layers))
    delta = next((one for one in shapes if one is not None), None)
    if not architecture.gguf.is_tiled or delta is None or delta.num_values == delta.num_keys:
        return None
    heads = np.arange(delta.num_values).reshape(-1, delta.num_keys).T.reshape(-1, 1)
    channels = (heads * delta.value_size + np.arange(delta.value_size)).ravel()
    before = 2 * delta.num_keys * delta.key_size
    orders = {
        "delta_heads": heads.ravel(),
        "delta_values": channels,
        "delta_in": np.concatenate([np.arange(before), before + channels]),
    }
    untiled = [Untiled(axis, orders[size]) for axis, size in enumerate(part.shape) if size in orders]
    return untiled[0] if untiled else None


def _vector(place: TensorPlace, architecture: Architecture, config: DecoderConfig) -> Weight | None:
    """Return what a vector becomes; None for a tensor that is not a vector."""
    layer, _, name = place.name.removeprefix("blk.").partition(".")
    role_and_part = next(((role, one) for role, one in architecture.vectors.items() if one.gguf_name == name), None)
    if role_and_part is None:
        return None
    role, part = role_and_part
    if len(part.shape) > len(place.shape):
        place = replace(place, shape=(1, *place.shape))  # as folders have it
    return Weight(
        f"model.layers.{layer}.{part.name}",
        place,
        None,
        stays_float=True,
        is_vector=True,
        is_rates=role == "rates",
        untiled=_untiled(part, architecture, config),
    )


def _unread(architecture: Architecture, config: DecoderConfig) -> set[str]:
    """Return the names of weights that no layer reads, though files may have them."""
    shapes = {idx: architecture.layer_shape(config, idx) for idx in range(config.num_hidden_layers)}
    parts = [(idx, part) for idx, shape in shapes.items() for part in architecture.unread(shape)]
    return {f"model.layers.{idx}.{part.name}.{kind}" for idx, part in parts for kind in ("weight", "bias")}


def row_order(num_rows: int, head_dim: int) -> IntArray | None:
    """Return which row of a file is which of the model: neighbours of a head turn there, its halves here."""
    if num_rows % head_dim:
        return None  # a shape that is refused later
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).transpose(0, 2, 1).reshape(-1)


def _check_weights(weights: Sequence[Weight], architecture: Architecture, config: DecoderConfig) -> None:
    """Check that there are all weights that the config asks for, in its shapes."""
    empty = {weight.name: np.broadcast_to(np.float32(0), weight.place.shape) for weight in weights}  # without memory
    try:
        DecoderModel(architecture, config, GenerationConfig(), empty)
    except KeyError as error:
        raise GgufError(f"is incomplete: its tensor {error.args[0]} is missing; copy or download it again") from None
    except ValueError as error:
        raise DamagedError(f"damaged: {error}") from None
