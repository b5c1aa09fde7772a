"""Each output of a command crossed with each of its other arguments: no file that one names is lost to the other."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from card.cli.parts.files import OutputPath
from tests.commands import run_command
from tests.crosses.typing import commands, needed, takes_text, typed

CONTENT = "what was in the file before\n"
_FORMS = ("{}", "name={}", "{}:0.5")  # of a text that names a file

_OUTPUTS = [
    (words, command, param)
    for words, command in commands()
    for param in command.params
    if isinstance(param.type, OutputPath)
]


@pytest.mark.parametrize(("words", "command", "output"), _OUTPUTS, ids=lambda one: getattr(one, "name", None))
def test_a_path_that_another_argument_names_too_is_refused_and_keeps_its_content(
    words: tuple[str, ...],
    command: click.Command,
    output: click.Parameter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "place.jsonl"
    is_folder = isinstance(output.type, OutputPath) and output.type.dir_okay
    place.mkdir() if is_folder else place.write_text(CONTENT)
    others = [one for one in command.params if one is not output and takes_text(one)]
    assert others
    for other in others:
        for form in _FORMS if isinstance(other.type, click.types.StringParamType) else _FORMS[:1]:
            twice = [*typed(other, form.format(place)), *typed(output, str(place))]
            ran = run_command(capsys, *words, *twice, *needed(command, tmp_path, output, other))
            assert ran.status == 2 and ran.out == "", (other.name, form)
            assert ran.err.startswith("card: error: ") and ran.err.count("\n") == 1, (other.name, form, ran.err)
            assert list(place.iterdir()) == [] if is_folder else place.read_text() == CONTENT, (other.name, form)


_TEXTS = [
    pytest.param(words, command, param, id=f"{' '.join(words)} {param.name}")
    for words, command in commands()
    for param in command.params
    if takes_text(param) and param.name != "system"  # whose absence it means
]


@pytest.mark.parametrize(("words", "command", "param"), _TEXTS)
def test_an_empty_text_is_refused_and_no_file_of_the_working_folder_changes(
    words: tuple[str, ...],
    command: click.Command,
    param: click.Parameter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ran = run_command(capsys, *words, *typed(param, ""), *needed(command, tmp_path, param))
    assert ran.status == 2 and ran.out == ""
    assert ran.err.startswith("card: error: ") and ran.err.count("\n") == 1, ran.err
    assert not any((tmp_path / "here").iterdir())


def _device_for(param: click.Parameter) -> str | None:
    """Return what names a device that never ends to a parameter that reads a file; None for other ones."""
    if isinstance(param.type, click.File | click.Path):
        return None if isinstance(param.type, OutputPath) and not param.type.is_read else "/dev/full"
    return "name=/dev/full" if param.name == "data" else None


_READ = [
    pytest.param(words, command, param, value, id=f"{' '.join(words)} {param.name}")
    for words, command in commands()
    for param in command.params
    if (value := _device_for(param)) is not None
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no such device")
@pytest.mark.parametrize(("words", "command", "param", "value"), _READ)
def test_a_device_that_never_ends_is_not_read(
    words: tuple[str, ...],
    command: click.Command,
    param: click.Parameter,
    value: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("card.text.lines.MOST_PIPED_BYTES", 1 << 16)
    ran = run_command(capsys, *words, *typed(param, value), *needed(command, tmp_path, param))
    assert ran.status == 2 and ran.out == ""
    assert ran.err.startswith("card: error: ") and ran.err.count("\n") == 1 and "/dev/full" in ran.err, ran.err


@pytest.mark.parametrize(
    "options", [["--target"], ["--draft"], ["--chat-template"], ["--writers", "store", "--suffix-store"]], ids=" ".join
)
def test_a_name_that_no_file_can_have_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_command(capsys, "generate", "hi", *options, "a" * 5000)
    assert (ran.status, ran.out) == (2, "") and ran.err.count("\n") == 1, ran.err
    assert "is too long for a name of a file" in ran.err
