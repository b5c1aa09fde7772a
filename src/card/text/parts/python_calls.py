"""Calls in the notation of Python."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from card.text.parts.calls import Calls
from card.text.parts.source import NoCallError, Reading, Source
from card.text.parts.values import json_of

_NAME = re.compile(r"[\w.\-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """A list of calls in Python: `[f(a=1), g(b="x")]`."""

    marker: str
    closing: str

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a block behind its marker."""
        yield from source.skip_space()
        is_list = (yield from source.takes("[")) is not None
        while True:
            yield from source.skip_space()
            name = yield from source.name(_NAME)
            if not (yield from source.takes("(")):
                raise NoCallError
            calls.begin(name)
            if (yield from self._read_arguments(source, calls, name)):
                calls.add("}")
                calls.end()
            yield from source.skip_space()
            if not (yield from source.takes(",")):
                break
        if is_list:
            yield from source.takes("]")
        yield from source.skip_space()
        yield from source.closes(self.closing)

    def _read_arguments(self, source: Source, calls: Calls, name: str) -> Reading[bool]:
        properties = dict(calls.tools[name].get("properties") or {})
        calls.add("{")
        joint = ""
        while True:
            yield from source.skip_space()
            if (yield from source.takes(")")):
                return True
            if not (yield from source.has(1)):
                return False
            parts: list[str] = []
            if (yield from source.until(["="], parts.append)) is None:
                return False
            key = "".join(parts).strip()
            value = yield from _python_value(source)
            calls.add(f"{joint}{json.dumps(key, ensure_ascii=False)}: {_json_of_python(value, properties.get(key))}")
            joint = ", "
            yield from source.takes(",")


_PYTHON_MARKS = ("'", '"', "(", "[", "{", ")", "]", "}", ",")


def _python_value(source: Source) -> Reading[str]:
    """Read a value up to the comma or bracket that ends it, which is left."""
    text, depth = "", 0
    while text or (yield from source.has(1)):
        parts: list[str] = []
        mark = yield from source.until(_PYTHON_MARKS, parts.append)
        text += "".join(parts)
        if mark is None:
            return text
        if mark in "'\"":
            text += mark + (yield from _python_string(source, mark))
        elif mark in "([{":
            depth, text = depth + 1, text + mark
        elif not depth:
            source.text = mark + source.text
            return text
        else:
            depth, text = depth - (mark in ")]}"), text + mark
    return text


def _python_string(source: Source, quote: str) -> Reading[str]:
    """Read a string up to its end, with line breaks escaped: chat templates write them as they are."""
    parts: list[str] = []

    def add(text: str) -> None:
        parts.append(text.replace("\r", "\\r").replace("\n", "\\n"))

    while (mark := (yield from source.until(["\\", quote], add))) == "\\":
        yield from source.has(1)
        parts.append(mark + source.take(1))
    return "".join(parts) + (mark or "")


def _json_of_python(text: str, schema: Any) -> str:
    stripped = text.strip()
    try:
        return json.dumps(ast.literal_eval(stripped), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json_of(stripped, schema)
