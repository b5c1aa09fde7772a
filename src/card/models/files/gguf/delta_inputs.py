"""Inputs of the delta rule, which GGUF files hold as two tensors, and folders of Qwen3-Next as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from card.models.architectures import find_architecture
from card.models.files.gguf.weights import Weight, row_bytes_of
from card.models.layer_shape import DeltaHeads
from card.models.own.plain_config import config_of

_QKV, _GATES, _JOINED = ".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_qkvz.weight"


def joined_inputs(weights: Sequence[Weight], config: Mapping[str, Any]) -> list[Weight]:
    """Return weights as a folder has them: several of one name are its rows, one after the other."""
    architecture, plain = find_architecture(config["model_type"]), config_of(config)
    if architecture is None or architecture.gguf.linears is None or plain is None:
        return list(weights)
    by_name, read = {weight.name: weight for weight in weights}, list[Weight]()
    for weight in weights:
        if weight.name.endswith(_QKV):
            shape = architecture.layer_shape(plain, int(weight.name.split(".")[2]))
            assert shape.delta is not None
            gates = by_name[weight.name.replace(_QKV, _GATES)]
            read += _of_each_key(weight, gates, shape.delta)
        elif not weight.name.endswith(_GATES):
            read.append(weight)
    return read


def _of_each_key(inputs: Weight, gates: Weight, delta: DeltaHeads) -> Iterator[Weight]:
    """Yield the rows of query, key, value and gate of one key after the other."""
    *sizes, gate_size = delta.joined_sizes
    firsts = np.cumsum([0, *(delta.num_keys * size for size in sizes)]).tolist()
    name = inputs.name.replace(_QKV, _JOINED)
    for key in range(delta.num_keys):
        for first, size in zip(firsts, sizes, strict=False):
            yield _rows(inputs, name, first + key * size, size)
        yield _rows(gates, name, key * gate_size, gate_size)


def _rows(weight: Weight, name: str, first: int, count: int) -> Weight:
    place = weight.place
    offset, shape = place.offset + first * row_bytes_of(place), (count, *place.shape[1:])
    return replace(weight, name=name, place=replace(place, offset=offset, shape=shape))
