"""Tensors that files of any architecture may store as one: queries, keys and values; gate and up of the MLP."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from card.models.architectures import Architecture
from card.models.architectures.architecture import sizes_of
from card.models.files.gguf.header import DamagedError, TensorPlace
from card.models.files.gguf.weights import PLAIN_DTYPES, row_bytes_of

FUSED: Mapping[str, Sequence[str]] = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up": ("ffn_gate", "ffn_up")}
_NAME = re.compile(rf"blk\.(\d{{1,6}})\.({'|'.join(FUSED)})\.(weight|bias)")


def cut_fused(places: Iterable[TensorPlace], architecture: Architecture, config: Any) -> list[TensorPlace]:
    """Return the tensors of a file as the architecture has them: some of one are rows of another.

    Raises: DamagedError if one has another number of rows than its parts, or is there twice.
    """
    found: dict[str, TensorPlace] = {}
    for whole in places:
        for place in _parts_of(whole, architecture, config):
            if place.name in found:
                raise DamagedError(f"damaged: it has {place.name} twice, alone and beside others")
            found[place.name] = place
    return list(found.values())


def has_bias(places: Mapping[str, TensorPlace], name: str) -> bool:
    """Return whether the first layer has a bias of a part, alone or beside others."""
    return any(f"blk.0.{one}.bias" in places for one in (name, *(one for one in FUSED if name in FUSED[one])))


def _parts_of(place: TensorPlace, architecture: Architecture, config: Any) -> Iterator[TensorPlace]:
    named, parts = _NAME.fullmatch(place.name), {part.gguf_name: part for part in architecture.linears}
    if named is None or named[2] in parts or int(named[1]) >= config.num_hidden_layers or len(place.shape) > 2:
        yield place
        return
    names = [name for name in FUSED[named[2]] if name in parts]  # one alone, where the architecture stores both as one
    sizes = sizes_of(config, architecture.layer_shape(config, int(named[1])))
    counts = [sizes[parts[name].shape[0]] for name in names]
    if place.shape[0] != sum(counts):
        raise DamagedError(f"damaged: its tensor {place.name} has {place.shape[0]} rows, its parts have {sum(counts)}")
    if len(place.shape) == 1 and place.type_id not in PLAIN_DTYPES:
        raise DamagedError(f"damaged: its tensor {place.name} is stored in blocks")
    row_bytes, first = row_bytes_of(place if len(place.shape) > 1 else replace(place, shape=(1,))), 0
    for name, count in zip(names, counts, strict=True):
        offset, shape = place.offset + first * row_bytes, (count, *place.shape[1:])
        yield replace(place, name=f"blk.{named[1]}.{name}.{named[3]}", offset=offset, shape=shape)
        first += count
