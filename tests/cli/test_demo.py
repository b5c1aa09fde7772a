"""What the demo computes in, and what it says of it."""

from __future__ import annotations

import functools

import pytest

from tests.commands import run_command

SHORT = ("--problems", "1", "--max-tokens", "4", "--target-cost", "16M", "--threads", "1")
HINT = "the weights run as they are stored; --dtype int8"


def test_the_demo_runs_as_stored_as_all_commands_do_and_in_integers_if_asked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = functools.partial(run_command, capfd)
    as_stored, in_integers = run("demo", *SHORT), run("demo", *SHORT, "--dtype", "int8")
    assert as_stored.status == in_integers.status == 0
    assert "target demo-target, draft demo-draft\n" in as_stored.out
    assert HINT not in in_integers.err


def test_a_demo_of_one_token_has_no_speed_and_ends_well(capfd: pytest.CaptureFixture[str]) -> None:
    ran = run_command(capfd, "demo", "--problems", "1", "--max-tokens", "1", "--target-cost", "16M", "--threads", "1")
    assert ran.status == 0 and "All methods wrote the same text" in ran.out
