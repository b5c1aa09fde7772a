"""Who types an option of another program is told ours, or that it is always on, or why it is not here."""

from __future__ import annotations

import re

import click
import pytest

from card.cli.main import cli
from card.cli.parts.other_names import all_names
from tests.commands import run_command

COMMANDS = ("serve", "generate", "chat")
ANSWER = re.compile(r"card: error: (\S+) is (another program's name: write (--\S+)|always on: .*|not here: .*)\n")


def options_of(command: str) -> set[str]:
    options = [one for one in cli.commands[command].params if isinstance(one, click.Option)]
    return {name for one in options for name in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("name", sorted(all_names()))
def test_the_name_of_another_program_gets_one_line_with_what_to_write_here(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for command in COMMANDS:
        if name in options_of(command):
            continue  # it is ours there
        ran = run_command(capsys, command, "model", f"{name}=4" if name.startswith("--") else name)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        if found := ANSWER.fullmatch(ran.err):
            assert found[1] == name
            assert found[3] is None or found[3] in options_of(command), "it can be typed in this command"
            answers.append(ran.err)
    assert answers, "no command has an answer"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "model", "-c", "4096"), "write --max-model-len"),
        (("serve", "-np", "4"), "write --max-num-seqs"),
        (("serve", "--cont-batching"), "always on"),
        (("serve", "--lora", "a"), "merge the adapter"),
        (("serve", "--temp", "1"), "each request says it"),
        (("generate", "hi", "--temp", "1"), "write --temperature"),
        (("generate", "--nonsense"), "No such option '--nonsense'"),
        (("generate", "--", "-c", "--nonsense"), "unexpected extra argument"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)
def test_what_is_said_fits_the_command(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_command(capsys, *arguments)
    assert ran.status == 2 and said in ran.err, ran.err


def test_the_help_of_the_server_begins_with_models_and_shows_the_lengths_and_numbers_that_servers_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = run_command(capsys, "serve", "--help").out
    assert re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)[0] == "Models"
    assert "--max-model-len" in shown and "--max-num-seqs" in shown
    assert "image" not in shown
