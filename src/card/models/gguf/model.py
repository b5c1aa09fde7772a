"""Models in GGUF files, llama.cpp's format: their config, tokenizer and weights in transformers' terms.

Weights are dequantised some rows at a time, so that no more than the result is ever held. Architectures
whose entry has llama.cpp's name are read; files that ask for more than is built here are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from card.kernels.blocks import BLOCK_FORMATS
from card.kernels.int8_linear import LANES
from card.models.architectures import Architecture, all_architectures
from card.models.decoder_model import DecoderModel, config_of
from card.models.gguf.header import GgufError, Header, TensorPlace, read_header
from card.models.gguf.keys import Facts
from card.models.gguf.tokenizer import end_ids, special_id

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PATTERN = "attention.sliding_window_pattern"  # how many layers have one without a window, or whether each has one
_TURNED = "rope.dimension_count"  # channels of a head
_NORM_EPS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # of norms that subtract the mean
_ROPE_FACTORS = "rope_freqs.weight"  # how Llama 3.1 and later files store the scaling of their angles
_LLAMA3_CONTEXT = 8192  # the length that those models were trained on first; no file tells it
PLAIN_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # of ggml's types
_BLOCK_ELEMENTS = 1 << 20  # dequantised at once
_SCALE_TOLERANCE = 1e-5  # relative, of a scale that files store in 32 bits

Dequantize = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the file that becomes one of the model."""

    name: str  # transformers'
    place: TensorPlace
    order: Tensor | None  # of its rows in the file; None: as they are
    offset: float = 0.0  # that files add to it


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A file whose header has been found to be that of a model that can be run."""

    path: Path
    header: Header
    config: Mapping[str, Any]  # as config.json has it; its dtype is that of the file, bfloat16 for a quantised one
    weights: Sequence[Weight]

    @property
    def num_elements(self) -> int:
        """Number of elements of the weights."""
        return sum(math.prod(weight.place.shape) for weight in self.weights)

    def read(self, weight: Weight, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a weight, some rows at a time. Raises: GgufError if the file has become shorter."""
        with self.path.open("rb") as stream:
            yield from _rows(stream, weight, dtype)

    def read_raw(self, weight: Weight) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the rows of a weight as the file has them, [out, bytes], in the model's order.

        Raises: GgufError if the file has become shorter.
        """
        with self.path.open("rb") as stream:
            stream.seek(weight.place.offset)
            raw = _raw(stream, weight.place.num_rows, _row_bytes(weight.place))
        return raw if weight.order is None else raw[weight.order.numpy()]


def open_gguf(path: Path) -> GgufModel:
    """Read the header of a file, and check that the model can be run.

    Raises: GgufError if it cannot, or the package gguf is missing; OSError if the file cannot be read.
    """
    header = read_header(path)
    _check_tensors(header)
    architecture = _architecture(header)
    config = _config(path, header, architecture)
    places = [place for place in header.tensors.values() if place.name != _ROPE_FACTORS]
    weights = [_weight(place, architecture, config["head_dim"]) for place in places]
    _check_weights(weights, architecture, config)
    by_name = {weight.name: weight for weight in weights}
    head = by_name.get("lm_head.weight")
    if head is not None and _are_equal(path, head, by_name["model.embed_tokens.weight"]):
        weights.remove(head)
        config["tie_word_embeddings"] = True
    return GgufModel(path, header, config, weights)


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what generation_config.json has: the tokens that begin and end a text."""
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _library() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise GgufError("is a GGUF file, which needs the package gguf; run pip install 'card-decoding[gguf]'") from None
    return gguf.quants


def _check_tensors(header: Header) -> None:
    """Check that each tensor lies inside the file and can be dequantised."""
    library = _library()
    sizes, types = library.GGML_QUANT_SIZES, library.GGMLQuantizationType
    for place in header.tensors.values():
        known = {one.value: one for one in types}.get(place.type_id)
        block, block_bytes = sizes[known] if known is not None else (0, 0)
        if known is None or not _can_dequantize(known, block_bytes, library.dequantize):
            name = f"type {place.type_id}" if known is None else known.name
            raise GgufError(f"has weights quantised as {name} ({place.name}), which cannot be read; use another one")
        if place.shape[-1] % block:
            raise GgufError(f"is damaged: rows of {place.shape[-1]} in {place.name} are no multiple of {block}")
        end = place.offset + math.prod(place.shape) // block * block_bytes
        if end > header.num_bytes:
            raise GgufError(f"is cut off: {place.name} ends at byte {end}, the file at {header.num_bytes}")


def _can_dequantize(kind: Any, block_bytes: int, dequantize: Dequantize) -> bool:
    try:
        return bool(dequantize(np.zeros((1, block_bytes), np.uint8), kind).dtype == np.float32)
    except (NotImplementedError, ValueError, TypeError):
        return False


def _architecture(header: Header) -> Architecture:
    """Return what the model is made of. Raises: GgufError if that is not known here."""
    known = {one.gguf_name: one for one in all_architectures() if one.gguf_name}
    if header.architecture not in known:
        raise GgufError(
            f"holds a model of the architecture {header.architecture or 'unknown'}; of GGUF files those of "
            f"{', '.join(known)} can be read, others from a folder saved by transformers"
        )
    return known[header.architecture]


def _config(path: Path, header: Header, architecture: Architecture) -> dict[str, Any]:
    """Return the config. Raises: GgufError if it asks for more than is built here."""
    metadata = header.metadata
    if metadata.get("general.type", "model") != "model":
        raise GgufError(
            f"holds no model but the type {str(metadata['general.type'])[:40]}; give the file of the model itself"
        )
    num_parts = metadata.get("split.count", 0)
    if not isinstance(num_parts, int) or num_parts > 1:
        raise GgufError("is one part of several; join them with llama-gguf-split --merge")
    facts = Facts(metadata, header.architecture)
    facts.check(path, architecture)
    hidden, heads = facts.whole("embedding_length"), facts.whole("attention.head_count")
    head_dim = _head_dim(facts, hidden, heads, architecture)
    places = header.tensors
    if "token_embd.weight" not in places:
        raise GgufError("has no tensor token_embd.weight, so it holds no whole model")
    ends = end_ids(metadata)
    stated = {
        "architectures": [architecture.model_class],
        "model_type": architecture.config_class.model_type,
        **_biases(places, architecture),
        **_scales(facts, architecture, head_dim),
        **{of: facts.cap(cap) for cap, of in architecture.caps.items()},
        **_windows(facts, architecture),
        "dtype": str(_stored_dtype(header)).removeprefix("torch."),
        "is_quantized": not _matrix_types(header) <= PLAIN_DTYPES.keys(),
        "runs_as_blocks": head_dim % LANES == 0 and _are_blocks(_matrix_types(header)),
        "head_dim": head_dim,
        architecture.activation: getattr(architecture.config_class, architecture.activation),
        "hidden_size": hidden,
        "intermediate_size": facts.whole("feed_forward_length"),
        "max_position_embeddings": facts.whole("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": facts.whole("block_count"),
        "num_key_value_heads": facts.whole("attention.head_count_kv", heads),
        architecture.norm_eps: facts.number(_NORM_EPS[architecture.centres]),
        "rope_parameters": _rotations(path, header, facts, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in places,
        "vocab_size": places["token_embd.weight"].shape[0],
        "bos_token_id": special_id(metadata, "bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": special_id(metadata, "padding"),
    }
    return {**stated, **architecture.gguf_fields(stated)}


def _head_dim(facts: Facts, hidden: int, heads: int, architecture: Architecture) -> int:
    """Return the size of a head. Raises: GgufError if a part of it has another one."""
    head_dim = facts.whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", *(() if architecture.turns_parts else (_TURNED,))):
        if (size := facts.whole(key, head_dim)) != head_dim:
            raise GgufError(
                f"has heads whose parts differ in size: {key} is {size}, not {head_dim}; use a folder saved by "
                "transformers"
            )
    return head_dim


def _biases(places: Mapping[str, TensorPlace], architecture: Architecture) -> dict[str, bool]:
    """Return the fields of the config that say which layers have biases, by what the file holds."""
    held = {architecture.stated_bias(part) for part in architecture.linears if f"blk.0.{part.gguf_name}.bias" in places}
    return {stated: stated in held for stated in architecture.biases.values() if isinstance(stated, str)}


def _scales(facts: Facts, architecture: Architecture, head_dim: int) -> dict[str, float]:
    """Return the fields of the config with factors. Raises: GgufError if attention has one that it has no field for."""
    usual = head_dim**-0.5
    scale = facts.factor("attention", usual)
    if "attention" not in architecture.scales and not math.isclose(scale, usual, rel_tol=_SCALE_TOLERANCE):
        raise GgufError(f"asks for attention.scale {scale}, not {usual:.4g}; use a folder saved by transformers")
    fields = {one: of for one, of in architecture.scales.items() if isinstance(of, str)}
    return {of: scale if one == "attention" else facts.factor(one, 1.0) for one, of in fields.items()}


def _windows(facts: Facts, architecture: Architecture) -> dict[str, Any]:
    """Return the window, and the kind of each layer if the file states it. Raises: GgufError if there may be none."""
    window, pattern = facts.optional("attention.sliding_window", 0), facts.optional(_PATTERN, None)
    if not architecture.has_windows:
        if window:
            raise GgufError(
                f"has a sliding window, which {architecture.gguf_name} models have not here; use a folder saved by "
                "transformers"
            )
        return {}
    found: dict[str, Any] = {"sliding_window": facts.whole("attention.sliding_window")} if window else {}
    if pattern is not None:
        layers = range(1, facts.whole("block_count") + 1)
        has_window = pattern if isinstance(pattern, list) else [layer % facts.whole(_PATTERN) for layer in layers]
        if len(has_window) != len(layers):
            raise GgufError(f"is damaged: it has {len(layers)} layers and tells of the windows of {len(has_window)}")
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in has_window]
    return found


def _rotations(
    path: Path, header: Header, facts: Facts, architecture: Architecture, head_dim: int
) -> dict[str, dict[str, Any]] | dict[str, Any]:
    """Return the settings of the angles, once for each kind of layer where layers with a window have their own."""
    rope, thetas = _rope(path, header, facts, head_dim), architecture.config_class.default_theta
    if architecture.turns_parts:
        turned = facts.whole(_TURNED, head_dim)
        if turned > head_dim or turned % 2:
            raise GgufError(f"is damaged: {turned} channels of heads of {head_dim} turn")
        part = turned / head_dim
        rope["partial_rotary_factor"] = part if int(head_dim * part) == turned else math.nextafter(part, 1.0)
    if not isinstance(thetas, Mapping):
        return rope
    theta = facts.number("rope.freq_base_swa", thetas["local"])
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _rope(path: Path, header: Header, facts: Facts, head_dim: int) -> dict[str, Any]:
    theta = facts.number("rope.freq_base", 10000.0)
    kind = facts.optional("rope.scaling.type", "linear")  # what llama.cpp takes for granted
    if kind not in ("none", "linear"):
        raise GgufError(
            f"scales its angles by {str(kind)[:40]}, which is not read from GGUF files; use the model's folder"
        )
    stated = [key for key in ("rope.scaling.factor", "rope.scale_linear") if facts.optional(key, None) is not None]
    if kind == "linear" and stated and facts.optional(stated[0], 0) not in (0, 1):  # 0 means none, as 1 does
        if _ROPE_FACTORS in header.tensors:
            raise GgufError(f"scales its angles twice, by {stated[0]} and by {_ROPE_FACTORS}; use the model's folder")
        return {"rope_type": "linear", "rope_theta": theta, "factor": facts.number(stated[0])}
    if _ROPE_FACTORS not in header.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    weight = Weight(_ROPE_FACTORS, header.tensors[_ROPE_FACTORS], None)
    with path.open("rb") as stream:
        factors = torch.cat(list(_rows(stream, weight, torch.float32)))
    if torch.equal(factors, torch.ones_like(factors)):
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(factors.max())
    if factors.shape != (head_dim // 2,) or not torch.allclose(factors, _llama3_factors(theta, head_dim, factor)):
        raise GgufError("scales its angles in a way that is not known here; use a folder saved by transformers")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> Tensor:
    """Return by how much Llama 3.1 slows each angle down: fast ones not at all, slow ones by ``factor``."""
    lengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kept = ((_LLAMA3_CONTEXT / lengths - 1) / 3).clamp(0, 1)  # 1 and 4 are the two frequencies that it goes between
    return (1 / ((1 - kept) / factor + kept)).float()


def _matrix_types(header: Header) -> set[int]:
    """Return what ggml calls the types of the weights but norms and biases, which are in float32 in every file."""
    return {place.type_id for place in header.tensors.values() if len(place.shape) > 1}


def _are_blocks(types: set[int]) -> bool:
    """Return whether matrices of these types run as they are, some of them in blocks."""
    return not types.isdisjoint(BLOCK_FORMATS) and types <= BLOCK_FORMATS.keys() | PLAIN_DTYPES.keys()


def _stored_dtype(header: Header) -> torch.dtype:
    """Return what the weights are in; bfloat16 for quantised ones."""
    types = _matrix_types(header)
    if not types <= PLAIN_DTYPES.keys():
        return torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in {PLAIN_DTYPES[one] for one in types}:
            return dtype
    return torch.float32


def _weight(place: TensorPlace, architecture: Architecture, head_dim: int) -> Weight:
    """Return what a tensor of the file becomes."""
    stem, _, kind = place.name.rpartition(".")
    outside = _OUTSIDE.get(stem)
    is_norm = len(place.shape) == 1 and kind == "weight"
    offset = architecture.norm_offset if is_norm else 0.0
    if outside is not None:
        return Weight(f"{outside}.{kind}", place, None, offset)
    prefix, _, name = stem.partition(".")[2].partition(".")
    part = next((one for one in architecture.parts if one.gguf_name == name), None)
    if not stem.startswith("blk.") or part is None:
        raise GgufError(f"has a tensor {place.name}, which is not known here; use a folder saved by transformers")
    is_paired = architecture.gguf_pairs and name in ("attn_q", "attn_k")
    order = _row_order(place.shape[0], head_dim) if is_paired else None
    return Weight(f"model.layers.{prefix}.{part.name}.{kind}", place, order, offset)


def _row_order(num_rows: int, head_dim: int) -> Tensor | None:
    """Return which row of a file is which of the model: neighbours of a head turn there, its halves here."""
    if num_rows % head_dim:
        return None  # a shape that is refused later
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)


def _check_weights(weights: Sequence[Weight], architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Check that there are all weights that the config asks for, in its shapes."""
    empty = {weight.name: torch.empty(weight.place.shape, device="meta") for weight in weights}
    plain = config_of(config)
    assert plain is not None
    try:
        DecoderModel(architecture, plain, GenerationConfig(), empty)  # type: ignore[no-untyped-call]
    except KeyError as error:
        raise GgufError(f"is incomplete: its tensor {error.args[0]} is missing") from None
    except ValueError as error:
        raise GgufError(f"is damaged: {error}") from None


def _are_equal(path: Path, one: Weight, other: Weight) -> bool:
    """Return whether two weights of one shape are equal; it ends at the first rows that differ."""
    with path.open("rb") as stream, path.open("rb") as beside:
        both = (_rows(s, weight, torch.float32) for s, weight in ((stream, one), (beside, other)))
        return all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def _rows(stream: BinaryIO, weight: Weight, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a weight of the file, some rows at a time."""
    library, place = _library(), weight.place
    dequantize: Dequantize = library.dequantize
    kind = library.GGMLQuantizationType(place.type_id)
    num_rows, row_bytes = place.num_rows, _row_bytes(place)
    stream.seek(place.offset)
    if len(place.shape) == 1:
        values = torch.from_numpy(dequantize(_raw(stream, 1, row_bytes), kind))[0] - weight.offset
        yield (values if weight.order is None else values[weight.order]).to(dtype)
        return
    if weight.order is not None:  # some rows of the file for each row of the model: small enough to be read at once
        raw = torch.from_numpy(_raw(stream, num_rows, row_bytes))[weight.order].numpy()
    step = max(1, _BLOCK_ELEMENTS // place.shape[-1])
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        part = raw[first : first + count] if weight.order is not None else _raw(stream, count, row_bytes)
        yield torch.from_numpy(dequantize(part, kind)).to(dtype)


def _row_bytes(place: TensorPlace) -> int:
    """Return the bytes of a row of a tensor."""
    library = _library()
    block, block_bytes = library.GGML_QUANT_SIZES[library.GGMLQuantizationType(place.type_id)]
    return int(place.shape[-1] // block * block_bytes)


def _raw(stream: BinaryIO, num_rows: int, row_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    raw = np.fromfile(stream, np.uint8, num_rows * row_bytes)
    if len(raw) < num_rows * row_bytes:
        raise GgufError("is cut off: it became shorter while it was read")
    return raw.reshape(num_rows, row_bytes)
