"""An architecture in llama.cpp's files: how they call it, what they state, and how they store it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from card.models.parts import ExpertPlace, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufMap:
    """The facts of the GGUF files of an architecture, besides the names of its parts."""

    name: str | None = None  # llama.cpp's; None: its files are named after another architecture
    also: str | None = None  # another name, of whose files some are its own
    pairs: bool = False  # rows of a head that turn together are neighbours
    sizes: Mapping[str, str] = field(default_factory=dict)  # keys of whole numbers, by the config's fields
    constants: Mapping[str, Any] = field(default_factory=dict)  # fields that no file states
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    """Fields that no file states, by the others."""
    layers: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = lambda facts, tensors, config: {}
    """Fields about unequal layers, by a file's facts, its tensors by their names, and the other fields."""
    keys: tuple[str, ...] = ()  # what it reads of the facts, besides what all files have
    ignored: frozenset[str] = frozenset()  # further keys that change nothing for text
    expert_scale: str | None = None  # the config's field for the factor of weights that files may state
    period: int = 0  # every such layer attends, unless files say otherwise; 0: those with KV heads do
    linears: tuple[Part, ...] | None = None  # linear layers as its files have them; None: they are alike
    expert_parts: Mapping[ExpertPlace, Part] | None = None  # likewise
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # which of their parts one here is made of
    is_tiled: bool = False  # value heads that share a key are apart

    @property
    def names(self) -> tuple[str, ...]:
        """llama.cpp's names of what its files may be named after."""
        return tuple(name for name in (self.name, self.also) if name is not None)
