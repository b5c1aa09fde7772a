"""Files of what training commands make: tensors, with facts as metadata, in safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import Array
from card.machine.memory import is_shortage
from card.models.files.headers import HeaderError
from card.models.files.tensor_files import MappedTensors, write_tensors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainedFile:
    """One kind of such files: its name, its format, and the command that makes it."""

    kind: str  # in words
    format: str
    command: str

    def check_made_for(self, made_for: str, name: str, difference: str, advice: str = "") -> None:
        """Refuse a file that was trained for another target or pair.

        Args:
            made_for: what such a file is made for, in a word: "target", "drafter" or "pair".
            name: of the file, or words for what it holds.
            difference: what the file was made for and what was given, in words; empty if they are the same.
            advice: what to do; by itself it names the command.
        Raises: ModelError.
        """
        if difference:
            advice = advice or f"train one for this {made_for} with {self.command}"
            raise ModelError(f"{name} was trained for another {made_for}: {difference}; {advice}")

    def save(self, path: str | Path, arrays: Mapping[str, Array], facts: Mapping[str, str]) -> None:
        """Write a file; it is whole or as before. Raises: ModelError if that fails."""
        try:
            write_tensors(Path(path), arrays, {**facts, "format": self.format})
        except OSError as error:
            raise ModelError(f"the {self.kind} cannot be written to {path}: {error}") from error

    def load(self, path: str | Path, make: Callable[[Mapping[str, str], dict[str, Array]], T], besides: str = "") -> T:
        """Return what ``make`` makes of a file's facts and arrays; ``besides`` says what else may be done without one.

        Raises: ModelError for one that is missing, cut off, of another kind, not finite, or lacks what ``make`` needs.
        """
        if not Path(path).is_file():
            raise ModelError(f"there is no file {path}; train a {self.kind} with {self.command}{besides}")
        try:
            file = MappedTensors(Path(path))
        except (HeaderError, OSError) as error:
            if is_shortage(error):
                raise
            raise ModelError(f"{path} is cut off or damaged: {error}; train it again with {self.command}") from error
        if file.facts.get("format") != self.format:
            raise ModelError(f"{path} is no {self.kind} ({self.format}); give a file that {self.command} wrote")
        try:
            if wrong := [name for name, array in file.arrays.items() if not np.isfinite(array).all()]:
                raise ValueError(f"its {wrong[0]} has NaN or infinity")
            return make(file.facts, file.arrays)
        except (KeyError, TypeError, ValueError, RuntimeError, ModelError) as error:
            if is_shortage(error):
                raise
            what = " ".join(str(error).split())
            raise ModelError(f"{path} is damaged: {what}; train it again with {self.command}") from error
