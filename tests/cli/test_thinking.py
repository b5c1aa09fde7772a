"""The line of thoughts on a terminal stays one line, so that it can be erased."""

from __future__ import annotations

import re
import unicodedata
from types import SimpleNamespace
from typing import Any

import pytest

from card.cli.thinking import ThoughtLine
from card.text.parts.pieces import Content, Thoughts
from tests.cli.terminal import screen


def test_the_newest_thoughts_fit_into_one_line_of_the_terminal_whatever_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with screen() as (file, shown):
        monkeypatch.setattr("sys.stdout", file)
        line = ThoughtLine()
        for text in (
            "Let me see:\n",
            "\u6211\u4eec\u5148\u7b97\u4e00\u4e0b\u8fd9\u4e2a\u6570\u5b57\uff0c",
            "then 6 + 2",
        ):
            chunk: Any = SimpleNamespace(thinks=[True], parts=[Thoughts(text)])
            line.show(chunk)
        ended: Any = SimpleNamespace(thinks=[], parts=[Content("8")])
        line.show(ended)
        frames = shown().split("\r\x1b[K")[1:]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", frame) for frame in frames]
    assert plain[0] == "Let me see:" and plain[2].endswith("then 6 + 2")
    for frame in plain[:3]:
        assert sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in frame) < 20
    assert plain[3].startswith("(thought for 3 tokens") and plain[3].endswith("\r\n8")


def test_content_before_further_thoughts_stays_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    with screen() as (file, shown):
        monkeypatch.setattr("sys.stdout", file)
        line = ThoughtLine()
        for parts in (
            [Thoughts("a"), Content("I look."), Thoughts("b")],
            [Content("\nDone.\n"), Thoughts("c")],
            [Content("8")],
        ):
            chunk: Any = SimpleNamespace(thinks=[True], parts=parts)
            line.show(chunk)
        lines = re.sub(r"[^\n]*\r\x1b\[K|\x1b\[[0-9;]*m", "", shown().replace("\r\n", "\n")).split("\n")
    notes = [f"(thought for {count} tokens; /thoughts shows them)" for count in (1, 2, 3)]
    assert lines == [notes[0], "I look.", notes[1], "", "Done.", notes[2], "8"]
