"""The prompt of `card generate`: an argument, a file, piped text, or an argument and piped text."""

from __future__ import annotations

import io
import math
import os
import stat
import sys
from pathlib import Path
from select import select

import click

from card.errors import PromptError, SettingsError
from card.text.lines import read_text, text_of

NOTICE_S = 1.0  # seconds without input until the user is told what the command waits for
MOST_IDLE_S = 600.0  # a pipe that never ends, inherited by chance, must not block a prompt forever


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt. Piped text follows an argument after a blank line.

    Raises: SettingsError for an argument together with a file; PromptError if there is none, or it cannot be read.
    """
    if file is not None and prompt is not None:
        raise SettingsError("the prompt is given twice, as an argument and as --prompt-file; leave one out")
    if file is not None:
        return read_text(file).strip("\n")
    if prompt in (None, "-"):
        if sys.stdin is None or sys.stdin.isatty():  # None: closed by the caller
            raise PromptError("no prompt: give it as an argument or on standard input")
        return _piped_text("to its end", math.inf)
    piped = _piped_text("too, to append it to the prompt; </dev/null skips this", MOST_IDLE_S) if _is_piped() else ""
    return "\n\n".join(part for part in (prompt, piped) if part)


def _is_piped() -> bool:
    """Return whether standard input is a file, a pipe or a socket: not a terminal, nor a device like /dev/null."""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:  # it is closed, or replaced by an object of this process
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _piped_text(what: str, most_idle_s: float) -> str:
    try:
        return text_of(_read_to_end(what, most_idle_s), "standard input").strip("\n")
    except OSError as error:
        raise PromptError(f"standard input cannot be read: {error.strerror}") from error


def _read_to_end(what: str, most_idle_s: float) -> bytes:
    """Return all of standard input; while waiting, say so on standard error.

    Raises: PromptError if nothing comes for ``most_idle_s`` seconds.
    """
    try:
        number = sys.stdin.fileno()
    except io.UnsupportedOperation:
        return sys.stdin.buffer.read()
    parts: list[bytes] = []
    idle_s, is_told = 0.0, False
    while True:
        if select([number], [], [], NOTICE_S)[0]:
            part, idle_s = os.read(number, 1 << 16), 0.0
            if not part:
                return b"".join(parts)
            parts.append(part)
            continue
        idle_s += NOTICE_S
        if idle_s >= most_idle_s:
            raise PromptError(
                f"standard input is open but sent nothing for {idle_s:g} s; end it, or run with </dev/null"
            )
        if not is_told:
            click.echo(f"card: reading standard input {what}", err=True)
            is_told = True
