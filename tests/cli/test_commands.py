"""What tests read of a command does not depend on the length of the paths in it."""

from __future__ import annotations

import click
import pytest
from rich.console import Console

from card.cli import demo
from card.cli.main import cli
from tests.commands import run_command


def test_no_line_is_broken_whatever_the_length_of_the_paths_in_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for length in range(1, 400):
        path = "/" + "x" * length
        said = f"target {path}, draft {path}, in float32: this CPU has no bfloat16 instructions"
        monkeypatch.setattr(demo, "run", lambda said=said, **_: Console().print(said))
        assert run_command(capfd, "demo").out == said + "\n"


def test_lines_are_broken_where_a_test_asks_for_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", lambda **_: Console().print("words " * 20))
    lines = run_command(capfd, "demo", columns=40).out.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40


def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for group in ((), *((name,) for name, one in cli.commands.items() if isinstance(one, click.Group))):
        alone, asked = run_command(capsys, *group), run_command(capsys, *group, "--help")
        assert alone == asked and "Commands:" in alone.out, group
        assert (alone.status, alone.err) == (0, "")
