"""Each number of each command: what only Python takes for one is refused in one line, before anything is loaded."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import click
import pytest

from card.config import DraftSettings, EngineSettings
from card.config.fields import declared
from card.errors import SettingsError
from card.server.config import ServerSettings
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


_TIMES = [
    pytest.param(owner, one.name, id=f"{owner.__name__} {one.name}")
    for owner in (EngineSettings, DraftSettings, ServerSettings)
    for one in declared(owner).values()
    if one.rule.unit == "seconds"
]


@pytest.mark.parametrize(("owner", "name"), _TIMES)
@pytest.mark.parametrize("seconds", [1e300, math.inf])
def test_a_time_that_no_thread_can_wait_for_is_refused(owner: type, name: str, seconds: float) -> None:
    assert owner(**{name: 1e9}) and threading.TIMEOUT_MAX > 1e9
    with pytest.raises(SettingsError, match=f"{name} must be"):
        owner(**{name: seconds})
