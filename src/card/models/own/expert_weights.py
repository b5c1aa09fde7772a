"""Weights of experts by name: each expert has its own here, and files may hold those of all experts as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from card.kernels.number_types import Array
from card.models.architectures import Architecture

T = TypeVar("T")

_JOINED = re.compile(r"(?P<block>.*\.experts)\.(?P<kind>gate_up|down)_proj(?P<bias>_bias)?")
_SINGLE = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.(weight|(?P<bias>bias))")


def split_experts(weights: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return weights by our names, those of experts one by one, as views of what holds them all.

    Args:
        weights: by the names that files or modules have.
        architecture: says what is replaced in these names, and how the experts lie in one.
    """
    return dict(_split(weights.items(), architecture))


def _split(weights: Iterable[tuple[str, Any]], architecture: Architecture) -> Iterator[tuple[str, Any]]:
    for name, weight in weights:
        for old, new in architecture.file_names.items():
            name = re.sub(old, new, name)  # noqa: PLW2901 - another name of the same weight
        match = _JOINED.fullmatch(name)
        if match is None or weight.ndim != (2 if match["bias"] else 3):
            yield name, weight
            continue
        end = "bias" if match["bias"] else "weight"
        for expert, expert_weight in enumerate(weight):
            for kind, part in _parts(expert_weight, match["kind"], architecture):
                yield f"{match['block']}.{expert}.{kind}_proj.{end}", part


def _parts(stored: Any, kind: str, architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Yield what the weight or the bias of one expert holds."""
    rows = stored.T if architecture.interleaves_experts else stored
    if kind == "down":
        yield "down", rows
        return
    yield from zip(("gate", "up"), halves(rows, architecture), strict=True)


def halves(rows: Any, architecture: Architecture) -> tuple[Any, Any]:
    """Return the rows of gate and those of up, of one matrix or vector of both."""
    if architecture.interleaves_experts:
        return rows[::2], rows[1::2]
    half = len(rows) // 2
    return rows[:half], rows[half:]


def grouped(weights: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Return weights by the names of transformers' modules: those of experts, in their order, under one name.

    Gate and up of an expert follow each other; so do several of one name, which are one matrix.
    """
    places: dict[str, list[tuple[tuple[int, int], T]]] = {}
    for name, weight in weights:
        match = _SINGLE.fullmatch(name)
        if match is None:
            places.setdefault(name, []).append(((0, 0), weight))
            continue
        kind = match["kind"]
        joined = f"{match['block']}.{'down' if kind == 'down' else 'gate_up'}_proj{'_bias' if match['bias'] else ''}"
        places.setdefault(joined, []).append(((int(match["expert"]), int(kind == "up")), weight))
    return {name: [weight for _, weight in sorted(parts, key=lambda part: part[0])] for name, parts in places.items()}


def joined_shape(name: str, shapes: Sequence[tuple[int, ...]], architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of what `grouped` has put under a name, of the shapes of its parts."""
    match = _JOINED.fullmatch(name)
    if match is None:
        return sum(shape[0] for shape in shapes), *shapes[0][1:]
    num_parts = _num_parts(match)
    of_expert = (num_parts * shapes[0][0], *shapes[0][1:])
    return len(shapes) // num_parts, *(reversed(of_expert) if architecture.interleaves_experts else of_expert)


def joined_pieces(
    name: str, parts: Sequence[T], read: Callable[[T], Iterable[Array]], architecture: Architecture
) -> Iterator[Array]:
    """Yield what `grouped` has put under a name, piece after piece as it lies in the memory of one array.

    Args:
        read: gives a part, some rows at a time.
    """
    match = _JOINED.fullmatch(name)
    if match is None or not architecture.interleaves_experts:
        for part in parts:
            yield from read(part)
        return
    num_parts = _num_parts(match)
    for first in range(0, len(parts), num_parts):
        pieces = [np.concatenate(list(read(part))) for part in parts[first : first + num_parts]]
        rows = np.stack(pieces, axis=1).reshape(-1, *pieces[0].shape[1:])
        yield np.ascontiguousarray(rows.T)


def _num_parts(match: re.Match[str]) -> int:
    return 2 if match["kind"] == "gate_up" else 1


def join_experts(weights: Iterable[tuple[str, Array]], architecture: Architecture) -> dict[str, Array]:
    """Return weights by the names of transformers' modules; those of experts are copies."""
    joined = grouped(weights)
    return {
        name: _joined(name, parts, architecture) if _JOINED.fullmatch(name) else parts[0]
        for name, parts in joined.items()
    }


def _joined(name: str, parts: Sequence[Array], architecture: Architecture) -> Array:
    pieces = [piece.reshape(-1) for piece in joined_pieces(name, parts, lambda part: [part], architecture)]
    return np.concatenate(pieces).reshape(joined_shape(name, [part.shape for part in parts], architecture))
