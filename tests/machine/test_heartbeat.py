"""Who reads a long command in a pipe is told what it does after ten seconds, and then every half a minute."""

from __future__ import annotations

import pytest

from card.cli.parts.starting import spinner
from card.cli.parts.tables import progress_bar, progress_in_words
from card.machine.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def unhurried() -> None:
    """Leave the times here as they are."""


class Clock:
    """Virtual time in which a block takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def wait(self, seconds: float) -> bool:
        self.left_s -= seconds
        return self.left_s < 0


@pytest.mark.parametrize(("seconds", "told"), [(9, []), (11, [10]), (39, [10]), (75, [10, 40, 70])])
def test_lines_come_after_ten_seconds_and_then_every_thirty(seconds: float, told: list[int]) -> None:
    lines: list[str] = []
    words = iter(("loading", "measuring", "decoding"))
    Heartbeat(lambda: next(words), lines.append, Clock(seconds).wait).run()
    assert lines == [f"{what} ({at} s)" for what, at in zip(("loading", "measuring", "decoding"), told, strict=False)]


def test_nothing_is_told_once_the_block_has_ended() -> None:
    lines: list[str] = []
    with Heartbeat(lambda: "loading", lines.append) as heartbeat:
        pass
    heartbeat.run()
    assert lines == []


def test_a_spinner_in_a_pipe_says_no_step_twice(capfd: pytest.CaptureFixture[str]) -> None:
    with spinner("loading", in_pipes=True) as say:
        for words in ("loading", "measuring", "measuring", "decoding"):
            say(words)
    assert capfd.readouterr().err == "loading\nmeasuring\ndecoding\n"


def test_a_log_gets_its_own_lines(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with spinner("loading", in_pipes=True, write=lines.append):
        pass
    assert (lines, capfd.readouterr().err) == (["loading"], "")


def test_a_bar_that_cannot_be_drawn_is_told_in_words() -> None:
    with progress_bar() as progress:
        assert progress_in_words(progress) == "preparing"
        progress.add_task("answering prompts", total=8, completed=3)
        assert progress_in_words(progress) == "answering prompts: 3 of 8"
        progress.add_task("training", total=None)
        assert progress_in_words(progress) == "training"
