"""Reading answers in tests: what was read, and ways to cut a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from card.text.parts.answer_format import AnswerFormat
from card.text.parts.pieces import CallArguments, CallBegun, Content, Piece, Thoughts, Tools
from card.text.parts.reader import AnswerReader


@dataclass
class Read:
    """What was read of an answer."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    thoughts: str = ""


def put_together(pieces: Iterable[Piece]) -> Read:
    """Return the parts of an answer from its pieces, none of which may be empty or out of order."""
    found = Read()
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                found.content += text
            case Thoughts(text):
                assert text
                found.thoughts += text
            case CallBegun(call_idx, name):
                assert call_idx == len(found.calls)
                found.calls.append((name, ""))
            case CallArguments(call_idx, text):
                assert call_idx == len(found.calls) - 1 and text
                found.calls[-1] = (found.calls[-1][0], found.calls[-1][1] + text)
    return found


def read(form: AnswerFormat, pieces: Sequence[str], tools: Tools, **how: Any) -> Read:
    """Read a text that comes in pieces."""
    reader = AnswerReader(form, tools, **how)
    found = put_together([*(one for text in pieces for one in reader.push(text)), *reader.flush()])
    assert reader.num_calls == len(found.calls)
    return found


def cut(text: str, places: list[int]) -> list[str]:
    """Cut a text at some places, counted modulo its length."""
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(borders)] or [""]
