"""The commands of `card` as a user may type them: all of them, and a value for each argument that must be given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from card.cli.main import cli


def commands(group: click.Group = cli, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the words and the command of each command, those of groups included."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name), command


def takes_text(param: click.Parameter) -> bool:
    """Return whether any text, hence any path, is of the kind of this argument."""
    return isinstance(param.type, click.Path | click.File | click.types.StringParamType)


def typed(param: click.Parameter, value: str) -> list[str]:
    """Return the words that give an argument a value."""
    values = [value] * max(1, param.nargs)
    return values if isinstance(param, click.Argument) else [param.opts[0], *values]


def harmless(param: click.Parameter, folder: Path) -> str:
    """Return a value that an argument can be given in any call."""
    if isinstance(param.type, click.Path):
        return str(folder / "folder" if param.type.dir_okay and not param.type.file_okay else folder / "file")
    return param.type.choices[0] if isinstance(param.type, click.Choice) else "1"
