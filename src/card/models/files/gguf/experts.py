"""Tensors of experts in GGUF files: each of them holds those of all experts, and becomes one weight for each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures import Architecture
from card.models.files.gguf.header import DamagedError, GgufError, TensorPlace
from card.models.files.gguf.keys import EXPERT_SCALE, GgufFacts
from card.models.files.gguf.weights import PLAIN_DTYPES, Weight, row_bytes_of
from card.models.parts import ExpertPlace, Part

_SINGLE = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # of one expert, as the first files of Mixtral have it
_JOINED = "ffn_gate_up_exps"  # gate and up of each expert, one behind the other
_IN_FLOATS: tuple[ExpertPlace, ...] = ("router", "shared_score")  # whatever type a file has them in
_BIAS = "bias"  # kind of a tensor [experts, out], others are [experts, out, in]
_MOST_EXPERTS = 4096  # no published model has half of it
_UNSTATED, _SOFTMAX, _SIGMOIDS, _SOFTMAX_OF_CHOSEN = 0, 1, 2, 3  # llama.cpp's numbers of routers


def stated_experts(facts: GgufFacts, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of the config about experts. Raises: GgufError if they are not those of a model run here."""
    if not architecture.gguf_experts or (architecture.may_lack_experts and not facts.optional("expert_count", 0)):
        return {}
    count, chosen = facts.whole("expert_count"), facts.whole("expert_used_count")
    if count > _MOST_EXPERTS:
        raise DamagedError(f"damaged: it has {count} experts, and at most {_MOST_EXPERTS} are possible")
    if chosen > count:
        raise GgufError(
            f"cannot be used: its tokens take {chosen} experts each (expert_used_count), and there are {count} of them"
            " (expert_count); copy or download it again"
        )
    fields: dict[str, Any] = {field: facts.whole(key) for field, key in architecture.gguf_experts.items()}
    if architecture.gguf.expert_scale is not None:
        scale = facts.number(EXPERT_SCALE) if facts.optional(EXPERT_SCALE, 0) != 0 else 1.0  # 0 means none
        fields[architecture.gguf.expert_scale] = scale
    normed = facts.optional("expert_weights_norm", None)
    return fields if normed is None else {**fields, "norm_topk_prob": bool(normed)}


def check_router(facts: GgufFacts, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Check that experts are chosen by the router that the architecture has. Raises: GgufError."""
    rule = architecture.experts
    function, name = (_SIGMOIDS, "sigmoid") if rule is not None and rule.has_sigmoids else (_SOFTMAX, "softmax")
    kind = facts.optional("expert_gating_func", function)
    is_normed = config.get("norm_topk_prob", True)
    if kind not in (_UNSTATED, function) and not (function == _SOFTMAX and kind == _SOFTMAX_OF_CHOSEN and is_normed):
        raise GgufError(
            f"chooses experts by a router of the kind {str(kind)[:40]} (expert_gating_func), which is not known here: "
            f"kind {function}, {name}, can be run; use a folder saved by transformers"
        )


def expert_weights(place: TensorPlace, architecture: Architecture, config: Mapping[str, Any]) -> list[Weight] | None:
    """Return what a tensor of experts becomes; None for another one.

    Raises: GgufError if it does not hold as many experts as the config says.
    """
    if not architecture.expert_parts or not architecture.gguf_experts.keys() <= config.keys():
        return None
    stem, _, kind = place.name.rpartition(".")
    if kind == "scale":  # a vector of its own
        return None
    layer, _, name = stem.removeprefix("blk.").partition(".")
    begin, parts = f"model.layers.{layer}.", architecture.expert_parts
    if (single := _SINGLE.fullmatch(name)) is not None:
        part = next(one for one in parts.values() if one.gguf_name == f"ffn_{single[1]}_exps")
        return [Weight(f"{begin}{part.name.format(single[2])}.{kind}", place, None)]
    if name == _JOINED:
        count = _count(place, kind, architecture, config)
        rows = place.shape[1] // 2
        return [
            *_each(place, parts["gate"], begin, kind, count, slice(0, rows)),
            *_each(place, parts["up"], begin, kind, count, slice(rows, 2 * rows)),
        ]
    role_and_part = {one.gguf_name: (role, one) for role, one in parts.items()}.get(name)
    if role_and_part is None:
        return None
    role, part = role_and_part
    if "{}" in part.name:
        count = _count(place, kind, architecture, config)
        return list(_each(place, part, begin, kind, count, slice(0, place.shape[1])))
    if len(place.shape) == 1 and kind == "weight":
        place = replace(place, shape=(1, *place.shape))
    return [Weight(f"{begin}{part.name}.{kind}", place, None, stays_float=role in _IN_FLOATS)]


def _count(place: TensorPlace, kind: str, architecture: Architecture, config: Mapping[str, Any]) -> int:
    """Return how many experts a tensor holds."""
    count = next(config[field] for field, key in architecture.gguf_experts.items() if key == "expert_count")
    if len(place.shape) != (2 if kind == _BIAS else 3) or place.shape[0] != count:
        raise DamagedError(f"damaged: {place.name} has shape {list(place.shape)}, and there are {count} experts")
    return int(count)


def _each(place: TensorPlace, part: Part, begin: str, kind: str, count: int, rows: slice) -> Iterator[Weight]:
    """Yield the weights or biases of all experts, of these rows of each."""
    if kind == _BIAS and place.type_id not in PLAIN_DTYPES:
        raise DamagedError(f"damaged: its tensor {place.name} is stored in blocks")
    shape = rows.stop - rows.start, *place.shape[2:]
    if math.prod(shape) == 0:
        raise DamagedError(f"damaged: {place.name} has shape {list(place.shape)}")
    row_bytes = row_bytes_of(replace(place, shape=(1,)) if kind == _BIAS else place)
    for expert in range(count):
        offset = place.offset + row_bytes * (place.shape[1] * expert + rows.start)
        yield Weight(f"{begin}{part.name.format(expert)}.{kind}", replace(place, shape=shape, offset=offset), None)
