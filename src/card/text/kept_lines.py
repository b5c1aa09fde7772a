"""Results of a long run, kept in a file of JSON lines: an interrupted run goes on from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from card.errors import ModelError
from card.machine.folders import replaced
from card.machine.memory import is_shortage


class KeptLines:
    """Results by key, in a file with the facts of its run in the first line. Each result is written at once."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Read the file if it is there; a last line that was cut off is dropped.

        Args:
            facts: of the run; a file of another run is refused.
        Raises: ModelError if the file is another run's, damaged or cannot be read.
        """
        self._path, self._facts = path, dict(facts)
        self.found: dict[str, Any] = {}
        if not path.exists():
            return
        try:
            whole = path.read_bytes().rpartition(b"\n")[0].decode("utf-8")
            first, *others = [json.loads(line) for line in whole.split("\n")]
            self.found = {str(key): value for key, value in others}
            differing = next((name for name in self._facts if first[name] != self._facts[name]), None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if is_shortage(error):
                raise
            raise self.damage(error) from error
        if differing:
            raise ModelError(
                f"{path} is of another run: its {differing} differs; give the options of that run, or delete it"
            )
        self._write([self._facts, *self.found.items()])

    def damage(self, error: Exception) -> ModelError:
        """Return the error for a damaged file."""
        return ModelError(f"{self._path} is damaged: {error!r}; delete it to begin anew")

    def add(self, key: str, value: Any) -> None:
        """Keep a result. Raises: ModelError if it cannot be written."""
        if not self._path.exists():
            self._write([self._facts])
        self.found[key] = value
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, value]) + "\n")
        except OSError as error:
            raise ModelError(f"{self._path} cannot be written: {error.strerror}") from error

    def delete(self) -> None:
        """Delete the file, if it is there."""
        self._path.unlink(missing_ok=True)

    def _write(self, lines: list[Any]) -> None:
        """Write the file; it is whole or as before."""
        try:
            with replaced(self._path) as part:
                part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise ModelError(f"{self._path} cannot be written: {error.strerror}") from error


def key_of(asked: Any) -> str:
    """Return a short key of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
