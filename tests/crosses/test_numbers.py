"""Each number of each command: what only Python takes for one is refused in one line, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from tests.commands import run_command
from tests.crosses.typing import commands, needed, typed

HUGE = str(10**30)
_KINDS = {click.types.IntParamType: (HUGE,), click.types.FloatParamType: ("nan",)}


def impossible(param: click.Parameter) -> tuple[str, ...]:
    """Return values of an option that Python reads as numbers of its kind, and that are none here."""
    return next((values for kind, values in _KINDS.items() if isinstance(param.type, kind)), ())


_NUMBERS = [
    pytest.param(words, command, param, value, id=f"{' '.join(words)} {param.name} {value[:3]}")
    for words, command in commands()
    for param in command.params
    for value in impossible(param)
]


@pytest.mark.parametrize(("words", "command", "param", "value"), _NUMBERS)
def test_a_number_beyond_64_bits_or_none_at_all_is_refused(
    words: tuple[str, ...],
    command: click.Command,
    param: click.Parameter,
    value: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = run_command(capsys, *words, *typed(param, value), *needed(command, tmp_path, param))
    assert ran.status == 2 and ran.out == ""
    assert ran.err.startswith("card: error: ") and ran.err.count("\n") == 1, ran.err
