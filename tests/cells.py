"""Tables of tests, of which `make test` takes enough cells that each two values meet once, and `make test-slow` all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def crossed(*values: Sequence[Any]) -> list[Any]:
    """Return all cells of the values of several parameters; those with no pair of values that is new are slow."""
    met: set[tuple[Any, ...]] = set()
    cells = []
    for cell in sorted(itertools.product(*map(range, map(len, values))), key=_spread):
        new = set(_pairs(cell)) - met
        met |= new
        chosen = [one[idx] for one, idx in zip(values, cell, strict=True)]
        cells.append(pytest.param(*chosen, marks=() if new else pytest.mark.slow))
    return cells


def _pairs(cell: Sequence[int]) -> Iterable[tuple[Any, ...]]:
    return itertools.combinations(enumerate(cell), 2)


def _spread(cell: Sequence[int]) -> tuple[int, ...]:
    """Order cells so that neighbours differ much, and few cover all pairs."""
    return (sum(cell) % 2, *cell)
