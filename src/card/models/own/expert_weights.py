"""Weights of experts by name: each expert has its own here, and files may hold those of all experts as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from card.kernels.number_types import Array

T = TypeVar("T")

_JOINED = re.compile(r"(?P<block>.*\.experts)\.(?P<kind>gate_up|down)_proj")
_SINGLE = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")


def split_experts(weights: Mapping[str, Any], file_names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return weights by our names, those of experts one by one, as views of what holds them all.

    Args:
        weights: by the names that files or modules have.
        file_names: patterns of what is replaced in these names; see `Architecture.file_names`.
    """
    return dict(_split(weights.items(), file_names or {}))


def _split(weights: Iterable[tuple[str, Any]], file_names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, weight in weights:
        for old, new in file_names.items():
            name = re.sub(old, new, name)  # noqa: PLW2901 - another name of the same weight
        found = _JOINED.fullmatch(name)
        if found is None or weight.ndim != 3:
            yield name, weight
            continue
        for expert, its in enumerate(weight):
            place = f"{found['block']}.{expert}."
            if found["kind"] == "down":
                yield f"{place}down_proj.weight", its
                continue
            half = len(its) // 2
            yield f"{place}gate_proj.weight", its[:half]
            yield f"{place}up_proj.weight", its[half:]


def grouped(weights: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Return weights by the names of transformers' modules: those of experts, in their order, under one name.

    Gate and up of an expert follow each other, which makes them one matrix; so do several of one name.
    """
    places: dict[str, list[tuple[tuple[int, int], T]]] = {}
    for name, weight in weights:
        found = _SINGLE.fullmatch(name)
        if found is None:
            places.setdefault(name, []).append(((0, 0), weight))
            continue
        kind = found["kind"]
        joined = f"{found['block']}.{'down' if kind == 'down' else 'gate_up'}_proj"
        places.setdefault(joined, []).append(((int(found["expert"]), int(kind == "up")), weight))
    return {name: [weight for _, weight in sorted(parts, key=lambda part: part[0])] for name, parts in places.items()}


def joined_shape(name: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of what `grouped` has put under a name, of the shapes of its parts."""
    found = _JOINED.fullmatch(name)
    if found is None:
        return sum(shape[0] for shape in shapes), *shapes[0][1:]
    halves = 2 if found["kind"] == "gate_up" else 1
    return len(shapes) // halves, halves * shapes[0][0], shapes[0][1]


def join_experts(weights: Iterable[tuple[str, Array]]) -> dict[str, Array]:
    """Return weights by the names of transformers' modules; those of experts are copies."""
    joined = grouped(weights).items()
    return {
        name: parts[0]
        if len(parts) == 1
        else np.concatenate(parts).reshape(joined_shape(name, [p.shape for p in parts]))
        for name, parts in joined
    }
