"""Names followed by numbers, such as ``relaxed:0.5``, ``judge.safetensors:0.2`` or ``sparse:0.1:64``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from card.errors import SettingsError

_FILE_END = ".safetensors"

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Named:
    """A name, and the numbers after it as written."""

    name: str
    numbers: tuple[str, ...] = ()

    def number(self, idx: int, usual: N, kind: Callable[[str], N]) -> N | None:
        """Return a number, or the usual one if it is not written; None if the text is not a number."""
        if idx >= len(self.numbers):
            return usual
        try:
            return kind(self.numbers[idx])
        except ValueError:
            return None


def parse_named(text: str, most: int = 1) -> Named:
    """Return the name in a text with at most so many numbers after it; the name itself may contain colons."""
    name, *numbers = text.rsplit(":", most)
    return Named(name, tuple(numbers))


@dataclass(frozen=True, slots=True)
class NamedKind:
    """A kind of thing with names and perhaps a knob; trained things are named by their files."""

    kind: str  # name of its `card train` command
    example: str

    def parse(self, text: str, known: Collection[str]) -> Named:
        """Return the name in a text, perhaps with a knob. Raises: SettingsError if it is neither known nor a file."""
        named = parse_named(text)
        if named.name not in known and not named.name.endswith(_FILE_END):
            if not known:
                raise SettingsError(
                    f"a {self.kind} is a file of card train {self.kind}, which ends in {_FILE_END}, with an optional"
                    f" knob, such as {self.example}; got {text!r}"
                )
            raise SettingsError(
                f"unknown {self.kind} {named.name!r}; known: {', '.join(known)}, each with an optional knob, such as"
                f" {self.example}, and files of card train {self.kind}, which end in {_FILE_END}"
            )
        return named

    def check_file(self, path: Path) -> None:
        """Refuse a file name that could not be given later. Raises: SettingsError."""
        if path.suffix != _FILE_END:
            raise SettingsError(f"the file of a {self.kind} must end in {_FILE_END}, got {path}; rename it")
