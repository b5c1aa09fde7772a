"""Calls with unquoted keys, and with texts between marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from card.text.parts.calls import Calls
from card.text.parts.source import NoCallError, Reading, Source
from card.text.parts.values import json_of

_NAME = re.compile(r"[\w.\-]+")
_MOST_DEPTH = 64  # of objects and lists within each other


@dataclass(frozen=True, slots=True, kw_only=True)
class BracedCalls:
    """`call:name{key:value}` with unquoted keys and texts between marks of their own, as Gemma 4 writes."""

    marker: str
    head: str
    quote: str
    end: str

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a call behind its marker."""
        if not (yield from source.takes(self.head)):
            raise NoCallError
        name = yield from source.name(_NAME)
        if not (yield from source.sees("{")):
            raise NoCallError
        calls.begin(name)
        if (yield from self._read_value(source, calls.add)):
            calls.end()
        yield from source.skip_space()
        yield from source.closes(self.end)

    def _read_value(self, source: Source, emit: Callable[[str], None], depth: int = 0) -> Reading[bool]:
        yield from source.skip_space()
        opener = yield from source.takes("{", "[", self.quote, '"')
        if opener is None:
            parts: list[str] = []
            mark = yield from source.until([",", "}", "]", self.end], parts.append)
            source.text = (mark or "") + source.text
            emit(json_of("".join(parts), None))
            return mark is not None and mark != self.end
        if opener in (self.quote, '"'):
            emit('"')
            closed = yield from source.until([opener], lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]))
            emit('"' if closed else "")
            return closed is not None
        if depth > _MOST_DEPTH:
            return False
        emit(opener)
        closing, joint = {"{": "}", "[": "]"}[opener], ""
        while True:
            yield from source.skip_space()
            if (yield from source.closes(closing)):
                emit(closing)
                return True
            if joint and not (yield from source.takes(",")):
                return False
            yield from source.skip_space()
            emit(joint)
            if opener == "{":
                parts = []
                quote = yield from source.takes(self.quote, '"')
                if (yield from source.until([quote or ":"], parts.append)) is None:
                    return False
                if quote:
                    yield from source.skip_space()
                    yield from source.takes(":")
                emit(json.dumps("".join(parts).strip(), ensure_ascii=False) + ": ")
            if not (yield from self._read_value(source, emit, depth + 1)):
                return False
            joint = ", "
