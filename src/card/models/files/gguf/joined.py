"""Weights that GGUF files hold as several tensors, and folders as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from card.models.architectures import find_architecture
from card.models.files.gguf.delta_inputs import joined_inputs
from card.models.files.gguf.weights import Weight


def joined_weights(weights: Sequence[Weight], config: Mapping[str, Any]) -> list[Weight]:
    """Return weights as a folder has them: several of one name are its rows, one after the other."""
    architecture = find_architecture(config["model_type"])
    assert architecture is not None
    whole = {
        part: (joined, place) for joined, parts in architecture.gguf.joins.items() for place, part in enumerate(parts)
    }
    renamed = [_renamed(weight, whole) for weight in weights]
    order = sorted(range(len(renamed)), key=lambda idx: renamed[idx][1])  # parts of one may stand in any order
    return joined_inputs([renamed[idx][0] for idx in order], config)


def _renamed(weight: Weight, whole: Mapping[str, tuple[str, int]]) -> tuple[Weight, int]:
    """Return a weight under the name of what it is a part of, and its place among the parts."""
    *_, stem = weight.name.split(".", 3) if weight.name.startswith("model.layers.") else ("",)
    part, _, kind = stem.rpartition(".")
    if part not in whole:
        return weight, 0
    joined, place = whole[part]
    return replace(weight, name=weight.name.removesuffix(f"{part}.{kind}") + f"{joined}.{kind}"), place
