"""A model's thoughts on the terminal: their newest words in one dim line, which shrinks to a note at their end."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from typing import TYPE_CHECKING

import click

from card.text.parts.pieces import Content, Thoughts

if TYPE_CHECKING:
    from card.api.outputs import StreamChunk

_ERASE = "\r\x1b[K"  # the line that the cursor is on


class ThoughtLine:
    """Shows the thoughts of one answer while they come; nothing where standard output is no terminal."""

    def __init__(self) -> None:
        self._thoughts, self._num_tokens, self._is_shown = "", 0, False

    def take(self, chunk: StreamChunk) -> None:
        """Take a chunk, before its content is shown."""
        self._num_tokens += sum(chunk.thinks)
        new = "".join(piece.text for piece in chunk.parts if isinstance(piece, Thoughts))
        self._thoughts += new
        if not sys.stdout.isatty():
            return
        if new:
            width = max(1, shutil.get_terminal_size().columns - 1)
            newest = _last_columns(" ".join(self._thoughts[-width:].split()), width)
            click.echo(_ERASE + click.style(newest, dim=True), nl=False)
            self._is_shown = True
        if any(isinstance(piece, Content) for piece in chunk.parts):
            self._collapse()

    def end(self) -> str:
        """Return all thoughts, after the last chunk."""
        self._collapse()
        return self._thoughts

    def _collapse(self) -> None:
        if self._is_shown:
            note = f"(thought for {self._num_tokens} tokens; /thoughts shows them)"
            click.echo(_ERASE + click.style(note, dim=True))
            self._is_shown = False


def _last_columns(text: str, columns: int) -> str:
    """Return the end of a text that fits so many columns: Chinese characters, for example, take two."""
    start = len(text)
    while start:
        columns -= 2 if unicodedata.east_asian_width(text[start - 1]) in "WF" else 1
        if columns < 0:
            break
        start -= 1
    return text[start:]
