"""The prompt of `card generate` joins its argument and what is piped in, and waits for neither in silence."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

from card.cli import prompt_input
from card.cli.prompt_input import read_prompt
from card.errors import PromptError


@contextmanager
def standard_input(monkeypatch: pytest.MonkeyPatch, place: int | str) -> Iterator[None]:
    with open(place, encoding="utf-8", closefd=isinstance(place, str)) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield


@dataclass(frozen=True)
class Pipe:
    reader: int
    writer: BinaryIO


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb", buffering=0) as stream:
        yield Pipe(reader, stream)
    os.close(reader)


def test_an_argument_stands_before_what_a_pipe_holds(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    pipe.writer.write(b"\xef\xbb\xbfone\r\ntwo\n")
    pipe.writer.close()
    with standard_input(monkeypatch, pipe.reader):
        assert read_prompt("Translate:", None) == "Translate:\n\none\ntwo"


def test_an_argument_stands_before_what_a_file_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one\n", "utf-8")
    for prompt, wanted in (("Translate:", "Translate:\n\none"), ("-", "one"), (None, "one")):
        with standard_input(monkeypatch, str(path)):
            assert read_prompt(prompt, None) == wanted


def test_an_empty_pipe_and_what_is_neither_pipe_nor_file_add_nothing(
    monkeypatch: pytest.MonkeyPatch, pipe: Pipe
) -> None:
    pipe.writer.close()
    with standard_input(monkeypatch, pipe.reader):
        assert read_prompt("hi", None) == "hi"
    for place in (os.devnull, "/dev/zero"):  # the latter never ends
        with standard_input(monkeypatch, place):
            assert read_prompt("hi", None) == "hi"
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompt("hi", None) == "hi"


def test_a_prompt_file_stands_alone(monkeypatch: pytest.MonkeyPatch, pipe: Pipe, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_text("from the file\n", "utf-8")
    with standard_input(monkeypatch, pipe.reader):  # which is never read: it has no end
        assert read_prompt(None, path) == "from the file"


def test_a_slow_pipe_is_waited_for_and_a_line_says_so_once(
    monkeypatch: pytest.MonkeyPatch, pipe: Pipe, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompt_input, "NOTICE_S", 0.01)
    told = threading.Event()
    echo = prompt_input.click.echo

    def tell(*words: str, **how: bool) -> None:
        echo(*words, **how)
        told.set()

    def write() -> None:
        told.wait(60)
        pipe.writer.write(b"late")
        pipe.writer.close()

    monkeypatch.setattr(prompt_input.click, "echo", tell)
    writer = threading.Thread(target=write)
    writer.start()
    with standard_input(monkeypatch, pipe.reader):
        assert read_prompt("hi", None) == "hi\n\nlate"
    writer.join()
    note = "card: reading standard input too, to append it to the prompt; </dev/null skips this\n"
    assert capsys.readouterr().err == note


def test_a_pipe_that_nobody_ends_holds_up_a_prompt_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch, pipe: Pipe
) -> None:
    monkeypatch.setattr(prompt_input, "NOTICE_S", 0.01)
    monkeypatch.setattr(prompt_input, "MOST_IDLE_S", 0.05)
    pipe.writer.write(b"begun")
    with (
        standard_input(monkeypatch, pipe.reader),
        pytest.raises(PromptError, match=r"is open but sent nothing for .* s; end it, or run with </dev/null"),
    ):
        read_prompt("hi", None)
