"""Files and folders that a command writes: whether that can be is found out before any long work begins."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from card.errors import SettingsError


class OutputPath(click.Path):
    """A file, or a folder, that the command will write. Folders on the way that are missing are no fault."""

    def __init__(self, *, is_folder: bool = False) -> None:
        super().__init__(file_okay=not is_folder, dir_okay=is_folder, path_type=Path)
        self._is_folder = is_folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Fails with a usage error if it cannot be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            check_can_write(path, is_folder=self._is_folder)
        except SettingsError as error:
            self.fail(str(error), param, ctx)
        return path


def check_can_write(path: Path, *, is_folder: bool = False) -> None:
    """Try whether a file can be written, or files into a folder; nothing is left behind and nothing is changed.

    Raises: SettingsError if not.
    """
    try:
        if is_folder or not path.exists():
            _try_folder(path if is_folder else path.absolute().parent)
        elif path.is_file():
            path.open("ab").close()
        elif path.is_dir():
            raise IsADirectoryError(21, "Is a directory", str(path))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"{path} cannot be written: {reason}; choose another place") from error


def _try_folder(folder: Path) -> None:
    """Write a file into a folder, or into the nearest one above it that is there, and remove it. Raises: OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    number, name = tempfile.mkstemp(prefix=".card-", dir=folder)
    os.close(number)
    Path(name).unlink()
