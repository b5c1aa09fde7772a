"""Files that commands read and write: prompts, and a check before long work that an output can be written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from card.errors import PromptError, SettingsError
from card.text.lines import numbered_lines

T = TypeVar("T")


class OutputPath(click.Path):
    """A file that the command will write. Missing parent folders are allowed."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Fails with a usage error if it cannot be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            check_can_write(path)
        except SettingsError as error:
            self.fail(str(error), param, ctx)
        return path


def check_can_write(path: Path) -> None:
    """Test whether a file can be written; nothing is left behind or changed. Raises: SettingsError if not."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory", str(path))
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # anything else is a device, which is not tested
            folder = path.absolute().parent
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            number, name = tempfile.mkstemp(prefix=".card-", dir=folder)
            os.close(number)
            Path(name).unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"{path} cannot be written: {reason}; choose another place") from error


# ---- prompts ---------------------------------------------------------------------------------------------------------


def read_prompts(path: Path, key: str = "question") -> tuple[str, ...]:
    """Return the prompts of a UTF-8 file; its lines are JSON if its name or its first line says so.

    Args:
        key: of the text in a line of JSON.
    Raises: PromptError if there are none, or one cannot be read.
    """
    numbered = numbered_lines(path, "prompts")
    if not holds_json(path, numbered):
        return tuple(line.strip() for _, line in numbered)
    return tuple(record[key] for record in read_records(path, key))


def holds_json(path: Path, numbered: Sequence[tuple[int, str]]) -> bool:
    """Return whether the lines of a file are JSON, by its name or its first line."""
    return path.suffix == ".jsonl" or numbered[0][1].lstrip().startswith("{")


def read_records(path: Path, *keys: str) -> tuple[dict[str, str], ...]:
    """Return the texts under ``keys`` of each line of a UTF-8 file; each line is a JSON object with these keys.

    Raises: PromptError if there are none, or one cannot be read.
    """
    return tuple(_record(path, number, line, keys) for number, line in numbered_lines(path, "prompts"))


def _record(path: Path, number: int, line: str, keys: tuple[str, ...]) -> dict[str, str]:
    def texts_of(found: Any) -> dict[str, str] | None:
        texts = {key: found[key] for key in keys}
        return texts if all(isinstance(text, str) and text.strip() for text in texts.values()) else None

    wanted = " and ".join(f'"{key}"' for key in keys)
    return parse_json_line(path, number, line, texts_of, f"{wanted}, {'a text' if len(keys) == 1 else 'texts'}")


def parse_json_line(path: Path, number: int, line: str, parse: Callable[[Any], T | None], wanted: str) -> T:
    """Return the result of ``parse`` for the JSON of a line.

    Raises: PromptError, with the line and what is ``wanted``, if the line is not JSON or ``parse`` refuses it: by None,
        KeyError, TypeError or AttributeError.
    """
    try:
        found = parse(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = None
    if found is None:
        raise PromptError(f"{path}, line {number}: must be a JSON object with {wanted}; got {line.strip()[:60]!r}")
    return found
