"""Each option of each command: with a value that holds it is read, with one that does not it is named and refused."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from card.cli.main import cli
from card.cli.parts.command import CardCommand
from card.cli.parts.refusals import ModeOption
from card.config import DraftSettings, EngineSettings
from card.config.fields import declared
from card.errors import CardError
from card.server.config import ServerSettings
from tests.crosses.given import every_command, held_by, refused_by

COMMANDS = dict(every_command(cli))
OPTIONS = [
    pytest.param(command, one, id=f"{path} {one.opts[0]}")
    for path, command in COMMANDS.items()
    for one in command.params
    if isinstance(one, click.Option) and one.expose_value
]
_OWNERS = (EngineSettings, DraftSettings, ServerSettings)
_CHOICES = {str(value) for owner in _OWNERS for one in declared(owner).values() for value in one.choices}
_KINDS = ("1", "0.5", "2", "4096", "2,3", "auto", "suffix", "300M", "5=-100", "sparse", *sorted(_CHOICES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    (made / "there.json").write_text("{}\n", "utf-8")
    return made


@pytest.fixture(autouse=True)
def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def parsed(command: CardCommand, folder: Path, *words: str) -> click.Context:
    """Parse what is typed, with what the command cannot do without. Raises: ClickException, CardError."""
    needed: list[str] = []
    for one in command.params:
        if one.required and not (isinstance(one, click.Option) and one.opts[0] in words):
            is_file = isinstance(one.type, click.Path) and one.type.exists
            needed += (
                held_by(one, folder)
                if isinstance(one, click.Option)
                else [str(folder / "there.json") if is_file else "1"]
            )
    return command.make_context(command.name, [*words, *needed])


def told(command: CardCommand, folder: Path, *words: str) -> str:
    """Return the error that a command makes of what is typed; empty if it takes it."""
    try:
        parsed(command, folder, *words)
    except click.ClickException as error:
        return error.format_message()
    except CardError as error:
        return str(error)
    return ""


def beside(command: CardCommand, option: click.Option, folder: Path) -> list[str]:
    """Return what an option needs beside it."""
    names = option.beside[:1] if isinstance(option, ModeOption) else ()
    return [word for one in command.params if one.name in names for word in held_by(one, folder)]


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_option_takes_a_value_that_holds(command: CardCommand, option: click.Option, folder: Path) -> None:
    usual, needed = held_by(option, folder), beside(command, option, folder)
    typed = [usual] if len(usual) != 2 else [usual, *([option.opts[0], value] for value in _KINDS)]
    errors: list[str] = []
    for words in typed:
        if not (error := told(command, folder, *words, *needed)):
            return
        errors.append(error)
    raise AssertionError(errors)


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_option_refuses_a_value_that_does_not_hold_and_is_named(
    command: CardCommand, option: click.Option, folder: Path
) -> None:
    words = refused_by(option, folder)
    needed = beside(command, option, folder)
    if words is None:  # a text: its setting says what may stand there, if it has one
        errors = [told(command, folder, option.opts[0], value, *needed) for value in ("", "no such thing", "-1", "x=y")]
        errors = [one for one in errors if one]
    else:
        errors = [told(command, folder, *words, *needed)]
        assert errors[0], "it takes what it may not"
    assert all(any(flag in one for flag in option.opts) and "\n" not in one for one in errors), errors


@pytest.mark.parametrize(("command", "option"), [one for one in OPTIONS if isinstance(one.values[1], ModeOption)])
def test_an_option_of_a_mode_is_refused_outside_of_it(command: CardCommand, option: ModeOption, folder: Path) -> None:
    own = held_by(option, folder)
    if option.beside:
        assert f"{option.opts[0]} goes with --" in told(command, folder, *own)
    for one in command.params:
        if one.name in option.apart_from:
            assert f"{option.opts[0]} does nothing beside {one.opts[0]}" in told(
                command, folder, *own, *held_by(one, folder)
            )
