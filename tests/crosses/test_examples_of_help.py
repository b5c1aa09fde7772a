"""Each value that a line of help gives as an example can be typed, and the text is that of plain decoding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from card.cli.parts.options import DEMO_DRAFT, DEMO_TARGET
from tests.commands import run_command
from tests.crosses.typing import commands, needed, typed

_EXAMPLE = re.compile(r"[Ss]uch as (\{[^}]*\}|[\w.]+[\w:,.]*\w|\w+)(?: or ([\w,]+\w|\w))?")
QUESTION = "Paul has 3 apples and buys 4 more. How many apples does he have?"


def examples(command: click.Command) -> Iterator[tuple[click.Parameter, str]]:
    """Yield the options of a command whose help gives examples, with each of these."""
    for param in command.params:
        for found in _EXAMPLE.finditer(getattr(param, "help", None) or ""):
            yield from ((param, value) for value in found.groups() if value)


_EXAMPLES = [
    pytest.param(words, command, param, value, id=f"{' '.join(words)} {param.name} {value}")
    for words, command in commands()
    for param, value in examples(command)
]


@pytest.mark.parametrize(("words", "command", "param", "value"), _EXAMPLES)
def test_an_example_of_help_is_taken(
    words: tuple[str, ...], command: click.Command, param: click.Parameter, value: str, tmp_path: Path
) -> None:
    arguments = [*typed(param, value), *needed(command, tmp_path, param)]
    context = command.make_context(words[-1], arguments)
    assert context.params[param.name or ""] is not None


_OF_GENERATE = [pytest.param(words, param, value, id=f"{param.name} {value}")
                for words, command in commands() if words == ("generate",)
                for param, value in examples(command) if param.name != "router"]  # fmt: skip


@pytest.mark.parametrize(("words", "param", "value"), _OF_GENERATE)
def test_an_example_of_help_gives_text(
    words: tuple[str, ...], param: click.Parameter, value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    models = ["--target", DEMO_TARGET, "--draft", DEMO_DRAFT, "--max-tokens", "8", "--temperature", "0"]
    ran = run_command(capfd, *words, QUESTION, *models, *typed(param, value))
    assert ran.status == 0 and ran.out.strip(), ran.err


def test_examples_are_found() -> None:
    said = (
        'Sources, such as beam,suffix: beam; numbers such as 0 or 0,1.  Fields, such as {"a": 1}; such as relaxed:0.5.'
    )
    found = [value for one in _EXAMPLE.finditer(said) for value in one.groups() if value]
    assert found == ["beam,suffix", "0", "0,1", '{"a": 1}', "relaxed:0.5"]
    assert len(_EXAMPLES) > 10
