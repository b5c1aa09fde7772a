"""Pieces of an answer: what a reader gives out, in the order in which it was written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a function; its arguments follow."""

    call_idx: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON of a call's arguments."""

    call_idx: int
    text: str


Piece = Thoughts | Content | CallBegun | CallArguments


@dataclass(slots=True)
class Said:
    """All that an answer says."""

    content: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names, and the JSON of the arguments

    @classmethod
    def by(cls, pieces: Iterable[Piece]) -> Said:
        """Return what these pieces say."""
        said = cls()
        for piece in pieces:
            match piece:
                case Content(text):
                    said.content += text
                case Thoughts(text):
                    said.thoughts += text
                case CallBegun(_, name):
                    said.calls.append((name, ""))
                case CallArguments(call_idx, text):
                    name, arguments = said.calls[call_idx]
                    said.calls[call_idx] = name, arguments + text
        return said


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces with neighbours of one part or one call as one piece."""
    made: list[Piece] = []
    for _, group in itertools.groupby(pieces, lambda one: (type(one), getattr(one, "call_idx", None))):
        those = list(group)
        text = "".join(one.text for one in those if not isinstance(one, CallBegun))
        match those[0]:
            case CallBegun():
                made += those
            case CallArguments(call_idx, _):
                made.append(CallArguments(call_idx, text))
            case Thoughts():
                made.append(Thoughts(text))
            case Content():
                made.append(Content(text))
    return made


Tools = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments of the functions that may be called, by name."""


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of arguments by function, of tools in OpenAI's shape; tools of another shape are left out."""
    functions = [one.get("function") for one in tools or ()]
    named = {str(one["name"]): one.get("parameters") for one in functions if isinstance(one, Mapping) and "name" in one}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in named.items()}
