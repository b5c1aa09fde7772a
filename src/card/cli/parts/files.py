"""Files that commands read and write: prompts, and outputs, which are checked before long work and replace no input."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from card.errors import PromptError, SettingsError
from card.machine.folders import followed, replaced
from card.text.lines import numbered_lines

T = TypeVar("T")
_ENDLESS = {os.makedev(1, minor) for minor in (5, 7, 8, 9)}  # of Linux: zero, full, random, urandom


class NamedPath(click.Path):
    """A file or a folder by its name."""

    is_read = True  # the command reads it, too

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Fails as `click.Path` does, and for an empty name, as of a shell's variable that is not set: Python would take
        it for the working folder.
        """
        if value == "":
            self.fail("a name of a file or a folder must not be empty", param, ctx)
        if self.is_read:
            _refuse_endless(self, value, param, ctx)
        return super().convert(value, param, ctx)


class ReadFile(click.File):
    """A file that is opened to read."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the open file. Fails as `click.File` does, and as `_refuse_endless`."""
        _refuse_endless(self, value, param, ctx)
        return super().convert(value, param, ctx)


def _refuse_endless(
    kind: click.Path | click.File, value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    """Fail for a device that is read without an end, such as /dev/zero: it would fill the memory."""
    with contextlib.suppress(OSError, ValueError):  # not there, which others tell
        facts = os.stat(value)
        if stat.S_ISCHR(facts.st_mode) and facts.st_rdev in _ENDLESS:
            kind.fail(f"{value} is a device that never ends; name a file", param, ctx)


class OutputPath(NamedPath):
    """A file or a folder that the command will write. Missing parent folders are allowed.

    `refuse_losses` refuses one that another argument names too.
    """

    def __init__(self, *, is_folder: bool = False, beside: Sequence[str] = (), is_read: bool = False) -> None:
        """Declare an output.

        Args:
            beside: endings of further files, which are kept beside it until it is written.
            is_read: the command reads it again, so that no device will do.
        """
        super().__init__(file_okay=not is_folder, dir_okay=is_folder, path_type=Path)
        self._is_folder, self._beside, self.is_read = is_folder, beside, is_read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Fails with a usage error if it cannot be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self._beside and not path.name:
            self.fail(f"must have a name, got {str(value)!r}; give one such as out: more is kept beside it", param, ctx)
        if self.is_read and path.exists() and not path.is_file():
            self.fail(f"{path} is no file, and what is written there is read again; name a file", param, ctx)
        try:
            check_can_write(path / "new" if self._is_folder else path)
        except SettingsError as error:
            self.fail(str(error), param, ctx)
        return path

    def written(self, path: Path) -> list[Path]:
        """Return the output and all that is written beside it meanwhile."""
        return [path, *(path.with_suffix(ending) for ending in self._beside)]


def refuse_losses(command: click.Command, context: click.Context) -> None:
    """Refuse an output that another argument of the command names: its content would be lost.

    Raises: SettingsError.
    """
    given = [(one, context.params[one.name]) for one in command.params if one.name in context.params]
    for output, path in given:
        if isinstance(output.type, OutputPath) and path is not None:
            for other, value in given:
                for lost in output.type.written(path) if other is not output else ():
                    if any(_would_lose(lost, one) for one in _paths_in(value)):
                        raise SettingsError(
                            f"{_flag(output)} would overwrite {lost}, which {_flag(other)} names; choose another place"
                        )


def _flag(param: click.Parameter) -> str:
    return param.human_readable_name if isinstance(param, click.Argument) else param.opts[0]


def _paths_in(value: Any) -> Iterator[Path]:
    """Yield the paths that the value of an argument may name: itself, behind NAME=, and before knobs such as :0.5."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, str):
        for text in (value, value.partition("=")[2]):
            parts = text.split(":")
            yield from (
                Path(os.path.expanduser(":".join(parts[:count]))) for count in range(len(parts), 0, -1) if parts[0]
            )
    elif isinstance(value, Iterable):
        for one in value:
            yield from _paths_in(one)
    elif isinstance(name := getattr(value, "name", None), str):  # an open file
        yield Path(name)


def _would_lose(output: Path, other: Path) -> bool:
    """Return whether writing the output changes what lies at the other path, or one of the files of a model there."""
    try:
        if output.exists() and not output.is_file() and not output.is_dir():
            return False  # a device
        if (other / "config.json").is_file() and output.is_file() and followed(other) in followed(output).parents:
            return True
        is_path = other.exists() or other.suffix or other.parent != Path()
        return bool(is_path) and (followed(other) == followed(output) or (other.exists() and other.samefile(output)))
    except (OSError, ValueError):  # no path, or one that is not there
        return False


def check_can_write(path: Path) -> None:
    """Test whether a file can be written; nothing is left behind or changed. Raises: SettingsError if not."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory", str(path))
        if path.is_file():
            path.open("ab").close()
        if path.is_file() or not path.exists():  # anything else is a device, which is not tested
            folder = followed(path).parent
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            number, name = tempfile.mkstemp(prefix=".card-", dir=folder)
            os.close(number)
            Path(name).unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"{path} cannot be written: {reason}; choose another place") from error


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give the place to write an output to. It takes its name at the end, so that the old one is kept until then.

    Raises: SettingsError if it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            yield path  # a device
            return
        place = followed(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replaced(place) as part:
            yield part
            if path.is_file():
                shutil.copymode(path, part)
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
    def texts_of(record: Any) -> dict[str, str] | None:
        texts = {key: record[key] for key in keys}
        return texts if all(isinstance(text, str) and text.strip() for text in texts.values()) else None

    wanted = " and ".join(f'"{key}"' for key in keys)
    return parse_json_line(path, number, line, texts_of, f"{wanted}, {'a text' if len(keys) == 1 else 'texts'}")


def parse_json_line(path: Path, number: int, line: str, parse: Callable[[Any], T | None], wanted: str) -> T:
    """Return the result of ``parse`` for the JSON of a line.

    Raises: PromptError, with the line and what is ``wanted``, if the line is not JSON or ``parse`` refuses it: by None,
        KeyError, TypeError or AttributeError.
    """
    try:
        row = parse(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        row = None
    if row is None:
        raise PromptError(f"{path}, line {number}: must be a JSON object with {wanted}; got {line.strip()[:60]!r}")
    return row
