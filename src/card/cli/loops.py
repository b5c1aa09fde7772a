"""Ends the display of a text that goes round in circles. The model's text is not changed: only less of it is shown."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from card.cli.parts.options import DEMO_TARGET
from card.config import SamplingParams

if TYPE_CHECKING:  # loaded by make_llm
    from card.api.llm import LLM, StreamChunk

_LONGEST_CIRCLE = 40  # characters
_LOOP_CHARS = 120  # that a text repeats itself for before it is ended: three times the longest circle


class LoopWatch:
    """Finds where a text has repeated itself for long: the same place, in whatever pieces the text comes."""

    def __init__(self) -> None:
        self._last = ""  # characters, at most those of the longest circle
        self._repeated = [0] * (_LONGEST_CIRCLE + 1)  # for each length of a circle: how many characters equalled it

    def end_in(self, piece: str) -> int | None:
        """Take the next piece; return how many of its characters come before the loop's end, None without a loop."""
        for idx, char in enumerate(piece):
            for length in range(1, len(self._last) + 1):
                self._repeated[length] = self._repeated[length] + 1 if self._last[-length] == char else 0
            self._last = (self._last + char)[-_LONGEST_CIRCLE:]
            if max(self._repeated) >= _LOOP_CHARS:
                return idx + 1
        return None


def without_loops(
    chunks: Generator[StreamChunk, None, None], llm: LLM, params: SamplingParams
) -> Generator[StreamChunk, None, None]:
    """Yield the chunks; of the built-in model, asked for no certain length, until its text repeats itself.

    The last chunk then has no reason to be the last: `remark` tells the user.
    """
    may_end = llm.settings.target == DEMO_TARGET and params.max_tokens is None and not params.ignore_eos
    watch = LoopWatch()
    with closing(chunks):
        for chunk in chunks:
            end = watch.end_in(chunk.text) if may_end else None
            if end is not None:
                yield replace(chunk, text=chunk.text[:end], finish_reason=None)
                return
            yield chunk
