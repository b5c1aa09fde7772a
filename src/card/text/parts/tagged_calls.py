"""Calls whose name and parameters stand between tags."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from card.text.parts.calls import Calls
from card.text.parts.source import NoCallError, Reading, Source
from card.text.parts.values import is_text_only, json_of

_NAME = re.compile(r"[\w.\-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Attributes behind a parameter's name, which tell whether its value is a text or JSON."""

    text: str  # for a text
    others: tuple[str, ...]  # for JSON
    end: str  # behind them


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """A name and parameters between tags; the values are texts, or JSON where the schema says another type."""

    marker: str
    head: tuple[str, str]  # around the name; both may be empty
    head_end: str = ""  # behind the name and what follows it
    head_rest: str = ""  # a pattern of what follows the name in a call that is forced
    key: tuple[str, str]  # around a parameter's name
    attributes: Attributes | None = None  # None: the schema of the parameter tells what its value is
    value: tuple[str, str]  # around its value, behind the name
    quotes: tuple[str, str] | None = None  # may stand around a value, within those
    whole: tuple[str, str] | None = None  # around all arguments in JSON, in place of parameters
    end: str  # of a call
    closing: str  # of a block
    pads: str = ""  # stands on both sides of a value, and is not part of it
    has_several: bool = False  # calls in a block

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a block behind its marker."""
        while True:
            yield from source.skip_space()
            if self.head[0] and not (yield from source.takes(self.head[0])):
                raise NoCallError
            name = yield from source.name(_NAME)
            if self.head[1] and not (yield from source.takes(self.head[1])):
                raise NoCallError
            if self.head_end and (yield from source.until([self.head_end], lambda _: None)) is None:
                raise NoCallError
            calls.begin(name)
            if (yield from self._read_arguments(source, calls, name)):
                calls.end()
            yield from source.skip_space()
            if self.closing != self.end and (yield from source.closes(self.closing)):
                return
            if not self.has_several or not (yield from source.sees(self.head[0])):
                return

    def _read_arguments(self, source: Source, calls: Calls, name: str) -> Reading[bool]:
        """Read the arguments of a call up to its end. Returns: whether it ended."""
        yield from source.skip_space()
        if self.whole is not None and (yield from source.takes(self.whole[0])):
            is_whole = yield from source.value(calls.add)
            yield from source.skip_space()
            yield from source.closes(self.whole[1])
            yield from source.skip_space()
            yield from source.closes(self.end)
            return is_whole
        is_whole = yield from self._read_parameters(source, calls, name)
        calls.add("}" if is_whole else "")
        return is_whole

    def _read_parameters(self, source: Source, calls: Calls, name: str) -> Reading[bool]:
        """Read parameters as an object whose last brace is left out. Returns: whether the call ended."""
        properties = dict(calls.tools[name].get("properties") or {})
        calls.add("{")
        joint = ""
        while True:
            yield from source.skip_space()
            mark = yield from source.takes(self.key[0], self.end)
            if mark is None:
                return not source.is_cut_off(self.key[0], self.end, *(self.whole or ())[:1])
            if mark == self.end:
                return True
            parts: list[str] = []
            if (yield from source.until([self.key[1]], parts.append)) is None:
                return False
            key = "".join(parts).strip()
            schema = properties.get(key)
            if self.attributes is not None:
                found: list[str] = []
                if (yield from source.until([self.attributes.end], found.append)) is None:
                    return False
                is_text = "".join(found).strip() == self.attributes.text.strip()
                schema = {"type": "string"} if is_text else _not_text(schema)
            if self.value[0]:
                yield from source.skip_space()
                yield from source.takes(self.value[0])
            calls.add(f"{joint}{json.dumps(key, ensure_ascii=False)}: ")
            joint = ", "
            if not (yield from self._read_value(source, calls, schema)):
                return False

    def _read_value(self, source: Source, calls: Calls, schema: Any) -> Reading[bool]:
        """Read a value up to its end; a mark within it that is followed by more of it is part of it."""
        if self.pads:
            yield from source.takes(self.pads)
        is_text = is_text_only(schema)
        parts: list[str] = []
        emit = (lambda text: calls.add(json.dumps(text, ensure_ascii=False)[1:-1])) if is_text else parts.append
        if is_text:
            calls.add('"')
        closing = self.value[1]
        if self.quotes is not None and (yield from source.takes(self.quotes[0])):
            closing = self.quotes[1] + closing
        while True:
            mark = yield from source.until([self.pads + closing, closing] if self.pads else [closing], emit)
            if mark is None:
                if not is_text:
                    calls.add(json_of("".join(parts), schema))
                return False
            space = yield from source.skip_space()
            follows = yield from source.sees(self.key[0], self.end)
            if follows is not None or (source.is_over and not source.text):
                break
            emit(mark + space)
        calls.add('"' if is_text else json_of("".join(parts), schema))
        return True


def _not_text(schema: Any) -> Any:
    """Return a schema for a value that is said to be JSON, though its own may allow only texts."""
    return {} if is_text_only(schema) else schema
