"""The method of two engines on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_starting import help_of, modules_after
from tests.commands import run_command
from tests.seeing import picture


def test_the_method_of_two_engines_completes_and_is_listed_where_it_can_be_taken() -> None:
    words = {"COMP_WORDS": "card generate --method arb", "COMP_CWORD": "3"}
    assert modules_after(env={"_CARD_COMPLETE": "bash_complete", **words})[1].split() == ["plain,arbitrage"]
    assert "arbitrage in generate" in " ".join(help_of("generate", "--help").split())


def test_it_takes_no_images(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture(1).save(tmp_path / "whole.png")
    ran = run_command(capfd, "generate", "the cat", "--image", str(tmp_path / "whole.png"), "--method", "arbitrage")
    assert ran.status == 2
    assert "--image does not go with --method arbitrage" in ran.err and "Traceback" not in ran.err
