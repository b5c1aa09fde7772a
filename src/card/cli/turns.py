"""Turns of `card chat`, made of the lines that a user types: one line or several, or a command."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from card.errors import PromptError
from card.text.lines import text_of

FENCE = '"""'  # opens and closes a block of lines
_FIRST, _NEXT = "> ", "... "  # prompts before the lines of a turn
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL | re.IGNORECASE)
_TAKES_BLOCKS = "/system"

Ask = Callable[[str], str | None]  # shows this prompt and returns a line; None: end of input


@dataclass(frozen=True, slots=True)
class Turn:
    """A message to the model, or a command with its text."""

    text: str
    command: str = ""  # such as /system; empty for a message


def read_turns(ask: Ask) -> Iterator[Turn]:
    """Yield turn by turn; empty lines are skipped."""
    while (line := ask(_FIRST)) is not None:
        turn = _whole_turn(line.strip("\n"), ask)
        if turn.command or turn.text:
            yield turn


def _whole_turn(line: str, ask: Ask) -> Turn:
    if "\n" in line:  # pasted at once: all of it is a message, even if it looks like a command
        return Turn(line.strip())
    head, fence, rest = line.partition(FENCE)
    if fence and head.strip() in ("", _TAKES_BLOCKS):
        return Turn(_block(rest, ask), command=head.strip())
    text = _continued(line, ask).strip()
    match = _COMMAND.fullmatch(text)
    return Turn(text) if match is None else Turn((match[2] or "").strip(), command=match[1].lower())


def _block(first: str, ask: Ask) -> str:
    """Return the text between two fences; the end of the input closes one too."""
    lines = [first]
    while not lines[-1].rstrip().endswith(FENCE):
        if (line := ask(_NEXT)) is None:
            return "\n".join(lines).strip()
        lines.append(line)
    return "\n".join(lines).rstrip().removesuffix(FENCE).strip()


def _continued(line: str, ask: Ask) -> str:
    """Return a line together with the following lines, as long as each one ends with a backslash."""
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(ask(_NEXT) or "")
    return "\n".join(lines)


# ---- standard input --------------------------------------------------------------------------------------------------


def ask_user(before: str) -> str | None:
    """Return a line of standard input, or several that were pasted at once; None at its end.

    Raises: PromptError if it is not UTF-8.
    """
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.readline()
        return text_of(data, "standard input").removesuffix("\n") if data else None
    try:
        return input(before).replace("\r\n", "\n").replace("\r", "\n")
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise PromptError("standard input is not valid UTF-8; convert it first") from None


def let_lines_be_edited() -> None:
    """Enable arrow keys, earlier lines and multi-line pastes on the terminal, by readline."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    try:
        readline = import_module("readline")
    except ImportError:  # some builds of Python lack it
        return
    if "libedit" not in (readline.__doc__ or ""):  # libedit has no such setting
        readline.parse_and_bind("set enable-bracketed-paste on")
