"""EAGLE-3 heads in GGUF files, in the terms of folders: names of tensors, halves of heads, tokens as offsets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from card.kernels.number_types import FLOAT32, STORED_DTYPES, Array, Dtype
from card.models.files.eagle_folder import LAYER_PREFIXES, HeadFacts, counted_layers
from card.models.files.gguf.config import ROTATION_TENSORS, rope_of, stored_dtype_of
from card.models.files.gguf.header import DamagedError, GgufError, Header, TensorPlace, read_header
from card.models.files.gguf.keys import GgufFacts
from card.models.files.gguf.model import row_order
from card.models.files.gguf.weights import Weight, check_tensors, read_rows

_KIND = "eagle3"
# The first entry of a file is its architecture: the key, the number of strings, and the length of the name.
_MARK = b"general.architecture" + (8).to_bytes(4, "little") + len(_KIND).to_bytes(8, "little") + _KIND.encode()
_MARK_BYTES = 1 << 16
_TOKENS, _TOKENS_KEY = "d2t", "tokenizer.ggml.tokens"
_WHOLE_NUMBERS: Mapping[int, Dtype] = {26: np.dtype(np.int32), 27: np.dtype(np.int64)}  # ggml's types
_NAMES: Mapping[str, str] = {
    "fc": "fc",
    "enc.output_norm": "input_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "blk.0.attn_norm": "layers.0.input_layernorm",
    "blk.0.attn_norm_2": "layers.0.hidden_norm",
    "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
    "blk.0.attn_q": "layers.0.self_attn.q_proj",
    "blk.0.attn_k": "layers.0.self_attn.k_proj",
    "blk.0.attn_v": "layers.0.self_attn.v_proj",
    "blk.0.attn_output": "layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "layers.0.mlp.up_proj",
    "blk.0.ffn_down": "layers.0.mlp.down_proj",
}
_TURNED = ("blk.0.attn_q", "blk.0.attn_k")


def is_eagle_gguf(path: Path) -> bool:
    """Return whether a GGUF file holds an EAGLE-3 head, by its first bytes. Raises: OSError."""
    with path.open("rb") as stream:
        return _MARK in stream.read(_MARK_BYTES)


def read_eagle_gguf(path: Path, dtype: str) -> tuple[HeadFacts, dict[str, Array], Dtype]:
    """Return what a file says of its head, its tensors by the names of folders, and the dtype of its weights.

    Args:
        dtype: "auto" is the file's own, bfloat16 for a quantised one.
    Raises: GgufError if it asks for more than is known here, or is damaged; OSError if it cannot be read.
    """
    header = read_header(path)
    tokens = header.tensors.get(_TOKENS)
    header = replace(header, tensors={name: one for name, one in header.tensors.items() if name != _TOKENS})
    check_tensors(header)
    stored = STORED_DTYPES.get(dtype) or stored_dtype_of(header)
    facts = GgufFacts(header.metadata, _KIND)
    sizes = _sizes(header, facts)
    found: dict[str, Array] = {}
    for place in header.tensors.values():
        if place.name in ROTATION_TENSORS:
            continue
        stem, _, kind = place.name.rpartition(".")
        if stem not in _NAMES or kind not in ("weight", "bias"):
            raise GgufError(f"holds a head with a tensor {place.name}, which is not known here; use its folder")
        order = row_order(place.shape[0], sizes["head_dim"]) if stem in _TURNED else None
        parts = read_rows(Weight(place.name, place, order), stored if len(place.shape) > 1 else FLOAT32)
        found[f"{_NAMES[stem]}.{kind}"] = np.concatenate(list(parts))
    if tokens is not None:
        ids = _read_ids(tokens, header.num_bytes)
        found[_TOKENS] = ids - np.arange(len(ids))
    head_facts = HeadFacts(
        sizes={**sizes, "name_or_path": str(path)},
        target_layers=_layers(facts),
        norm_before_residual=_flag(facts, "norm_before_residual"),
        norm_output=False,
        asks_input_norm=_flag(facts, "norm_before_fc"),
        asks_layer_norms=False,
    )
    return head_facts, found, stored


def in_file_words(words: str) -> str:
    """Return words about a tensor of a head, which have its name of folders, with the name that files have for it."""
    for part, name in _NAMES.items():
        named = re.escape(name).replace(re.escape(LAYER_PREFIXES[1]), f"(?:{'|'.join(map(re.escape, LAYER_PREFIXES))})")
        words = re.sub(rf"(?<![\w.]){named}(?=\.(?:weight|bias))", part, words)
    return words.replace("config.json", "metadata")


def _sizes(header: Header, facts: GgufFacts) -> dict[str, Any]:
    """Return the sizes of the layer, as the config of a Llama has them."""
    heads, hidden = facts.whole("attention.head_count"), facts.whole("embedding_length")
    head_dim = facts.whole("attention.key_length", max(1, hidden // heads))
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": facts.whole("context_length", 1),
        "rope_parameters": rope_of(header, facts, head_dim),
    }
    words = header.metadata.get(_TOKENS_KEY)
    if words is not None:
        sizes["vocab_size"] = len(words)
    return sizes


def _layers(facts: GgufFacts) -> tuple[int, ...] | None:
    ids = facts.optional("target_layers", facts.optional("extract_layers", None))
    if ids is None:
        return None
    ids = [int(one) for one in ids] if isinstance(ids, list) else [ids]
    return counted_layers(ids, is_output=False)


def _flag(facts: GgufFacts, key: str) -> bool:
    value = facts.optional(key, False)
    if not isinstance(value, bool):
        raise GgufError(f"cannot be used: its {_KIND}.{key} is {str(value)[:40]}, it must be true or false")
    return value


def _read_ids(place: TensorPlace, num_bytes: int) -> Array:
    """Return the tokens of the head's outputs. Raises: GgufError if they are no list of whole numbers."""
    dtype, count = _WHOLE_NUMBERS.get(place.type_id), math.prod(place.shape)
    if dtype is None or len(place.shape) != 1:
        raise GgufError(f"holds a head whose {_TOKENS} is no list of whole numbers; use its folder")
    if place.offset + count * dtype.itemsize > num_bytes:
        raise DamagedError(f"cut off: {_TOKENS} ends behind the file")
    raw = np.fromfile(place.file, np.uint8, count * dtype.itemsize, offset=place.offset)
    return raw.view(dtype).astype(np.int64)
