"""Names with numbers behind them, such as ``relaxed:0.5``, ``judge.safetensors:0.2`` or ``sparse:0.1:64``."""

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
    """A name, and the numbers behind it as they were written."""

    name: str
    numbers: tuple[str, ...] = ()

    def number(self, idx: int, usual: N, kind: Callable[[str], N]) -> N | None:
        """Return a number, the usual one where none is written; None if what is written is none."""
        if idx >= len(self.numbers):
            return usual
        try:
            return kind(self.numbers[idx])
        except ValueError:
            return None


def parse_named(text: str, most: int = 1) -> Named:
    """Return the name in a text, and the numbers behind it, so many at most; a name may hold colons itself."""
    name, *numbers = text.rsplit(":", most)
    return Named(name, tuple(numbers))


@dataclass(frozen=True, slots=True)
class NamedKind:
    """A kind of thing that is named, perhaps with a knob; what was trained is named by its file."""

    kind: str  # as the command of `card train`
    example: str

    def parse(self, text: str, known: Collection[str]) -> Named:
        """Return the name in a text and perhaps its knob. Raises: SettingsError for one neither known nor a file's."""
        found = parse_named(text)
        if found.name not in known and not found.name.endswith(_FILE_END):
            raise SettingsError(
                f"unknown {self.kind} {found.name!r}; known: {', '.join(known)}, each with a knob if you like, such as"
                f" {self.example}, and files of card train {self.kind}, which end in {_FILE_END}"
            )
        return found

    def check_file(self, path: Path) -> None:
        """Refuse a file that could not be named afterwards. Raises: SettingsError."""
        if path.suffix != _FILE_END:
            raise SettingsError(f"the file of a {self.kind} must end in {_FILE_END}, got {path}; name it so")
