"""Calls whose arguments are elements within each other, each behind a mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from card.text.parts.calls import Calls
from card.text.parts.source import NoCallError, Reading, Source
from card.text.parts.values import is_text_only, json_of

_NAME = re.compile(r"[\w.\-]+")
_MOST_DEPTH = 64  # of objects and lists within each other


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedCalls:
    """An element for each argument, with elements within it for what is in an object or a list.

    A mark stands before each tag, so that no text can be taken for one.
    """

    marker: str
    mark: str  # before each tag
    head: tuple[str, str]  # around a function's name, behind the mark
    item: str  # name of the elements of a list
    end: str  # of a call, behind the mark
    closing: str  # of a block

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a block behind its marker."""
        while True:
            yield from source.skip_space()
            if not (yield from source.takes(self.mark + self.head[0])):
                raise NoCallError
            name = yield from source.name(_NAME)
            if not (yield from source.takes(self.head[1])):
                raise NoCallError
            calls.begin(name)
            calls.add("{")
            if (yield from self._read_elements(source, calls.add, calls.tools[name], self.mark + self.end, 0)):
                calls.add("}")
                calls.end()
            yield from source.skip_space()
            if (yield from source.closes(self.closing)) or not (yield from source.sees(self.mark + self.head[0])):
                return

    def _read_elements(
        self, source: Source, emit: Callable[[str], None], schema: Any, end: str, depth: int, *, is_list: bool = False
    ) -> Reading[bool]:
        """Read the elements of an object or a list up to its end, as JSON without the brackets.

        Returns: whether it ended.
        """
        joint = ""
        while True:
            key = yield from self._next_key(source, end)
            if key is None:
                return not is_list and not source.is_cut_off(end, self.mark + "<")
            if not key:
                return True
            emit(joint if is_list else f"{joint}{json.dumps(key, ensure_ascii=False)}: ")
            joint = ", "
            below = _of_items(schema) if is_list else _of_property(schema, key)
            if not (yield from self._read_value(source, emit, below, key, depth)):
                return False

    def _next_key(self, source: Source, end: str) -> Reading[str | None]:
        """Read the tag that begins an element and return its name; "" at the end, None if there is neither."""
        yield from source.skip_space()
        if (reached := (yield from source.takes(end, self.mark + "<"))) is None:
            return None
        if reached == end:
            return ""
        parts: list[str] = []
        mark = yield from source.until([">"], parts.append)
        key = "".join(parts).strip()
        return key if mark and key and not key.startswith("/") else None

    def _read_value(
        self, source: Source, emit: Callable[[str], None], schema: Any, key: str, depth: int
    ) -> Reading[bool]:
        """Read a value up to the tag that ends its element. Returns: whether it ended."""
        end = f"{self.mark}</{key}>"
        if is_text_only(schema):
            emit('"')
            mark = yield from source.until([end], lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]))
            emit('"' if mark else "")
            return mark is not None
        kind = schema.get("type") if isinstance(schema, dict) else None
        space = yield from source.skip_space()
        child = yield from source.sees(self.mark + "<", end, f"{self.mark}<{self.item}>")
        is_empty = child == end and not space
        if child is None or (is_empty and kind not in ("object", "array")) or depth > _MOST_DEPTH:
            source.text = space + source.text
            parts: list[str] = []
            mark = yield from source.until([end], parts.append)
            emit(json_of("".join(parts), schema))
            return mark is not None
        is_list = kind == "array" or (kind != "object" and child == f"{self.mark}<{self.item}>")
        emit("[" if is_list else "{")
        is_whole = yield from self._read_elements(source, emit, schema, end, depth + 1, is_list=is_list)
        emit(("]" if is_list else "}") if is_whole else "")
        return is_whole


def _of_items(schema: Any) -> Any:
    return schema.get("items") if isinstance(schema, dict) else None


def _of_property(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get(key) if isinstance(properties, dict) else None
