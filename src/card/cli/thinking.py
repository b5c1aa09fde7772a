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
    """Shows one answer while it comes: content as it is; thoughts only where standard output is a terminal."""

    def __init__(self) -> None:
        self._thoughts, self._num_tokens, self._is_shown = "", 0, False
        self._is_within_line = False  # content ends here, which must not be erased

    def show(self, chunk: StreamChunk) -> None:
        """Show what a chunk adds."""
        self._num_tokens += sum(chunk.thinks)
        for piece in chunk.parts:
            if isinstance(piece, Thoughts):
                self._think(piece.text)
            elif isinstance(piece, Content):
                self._collapse()
                click.echo(piece.text, nl=False)
                self._is_within_line = not piece.text.endswith("\n")
        sys.stdout.flush()

    def _think(self, text: str) -> None:
        self._thoughts += text
        if not sys.stdout.isatty():
            return
        if self._is_within_line:
            click.echo()
            self._is_within_line = False
        width = max(1, shutil.get_terminal_size().columns - 1)
        newest = _last_columns(" ".join(self._thoughts[-width:].split()), width)
        click.echo(_ERASE + click.style(newest, dim=True), nl=False)
        self._is_shown = True

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
