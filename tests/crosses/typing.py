"""What a user may type: each command, a value for each argument that must be given, and runs without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from card.cli.main import cli
from tests.alone import ALONE, alone

# Runs each line of a file as a command, and prints what came of it: all in one process, as each start takes a second.
EACH = (
    ALONE
    + """
import io, json
from contextlib import redirect_stderr, redirect_stdout
from card.cli.main import main
for line in open(sys.argv[1], encoding="utf-8"):
    sys.argv, out, err = ["card", *json.loads(line)], io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""
)


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


def needed(command: click.Command, folder: Path, *but: click.Parameter) -> list[str]:
    """Return a value for each argument of a command that must be given, but for some."""
    return [word for one in command.params if one.required and one not in but for word in typed(one, _any(one, folder))]


def _any(param: click.Parameter, folder: Path) -> str:
    """Return a value of an argument's kind. What the folder lacks of it is made."""
    if isinstance(param.type, click.Choice):
        return str(param.type.choices[0])
    if not isinstance(param.type, click.Path):
        return "1"
    if param.type.file_okay:
        file = folder / f"{param.name}.safetensors"
        file.touch()
        return str(file)
    return str(folder / "folder")


def without_torch(lines: Sequence[Sequence[str]], folder: Path) -> list[tuple[int, str, str]]:
    """Run commands where PyTorch cannot be imported; return the status, output and standard error of each."""
    (folder / "lines").write_text("".join(json.dumps(list(line)) + "\n" for line in lines), "utf-8")
    done = alone(str(folder / "lines"), program=EACH)
    assert done.returncode == 0, done.stderr
    return [(int(status), out, err) for status, out, err in map(json.loads, done.stdout.splitlines())]
