"""Ways in which models write calls: one small parser for each, and what it is called with as data.

A parser is entered behind the marker that begins a block of calls. It raises `NoCallError` as long as nothing tells
that there is a call of an offered function; from then on the call is given out as it comes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from card.text.parts.pieces import CallArguments, CallBegun, Piece, Tools
from card.text.parts.source import NoCallError, Reading, Source

_NAME = re.compile(r"[\w.\-]+")
_SPACED_NAME = re.compile(r"\s*[\w.\-]+")
_KEYS = ("name", "tool_name", "function", "arguments", "parameters", "id", "tool_call_id", "type")
_NAME_KEYS, _ARGUMENT_KEYS = ("name", "tool_name", "function"), ("arguments", "parameters")


class Calls:
    """Takes the calls that a parser finds; knows which functions may be called."""

    def __init__(self, tools: Tools, give: Callable[[Piece], None]) -> None:
        """Begin with no call; ``give`` gets the pieces."""
        self.tools, self._give = tools, give
        self.num_calls = 0
        self.is_open = False  # within the arguments of a call

    def begin(self, name: str) -> None:
        """Begin a call. Raises: NoCallError for a function that is not offered."""
        if name not in self.tools:
            raise NoCallError
        self._give(CallBegun(self.num_calls, name))
        self.num_calls += 1
        self.is_open = True

    def add(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        if text:
            self._give(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """End the last call."""
        self.is_open = False


class CallSyntax(Protocol):
    """One way to write calls."""

    @property
    def marker(self) -> str:
        """What begins a block of calls, anywhere in an answer."""

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a block behind its marker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Blocks of JSON objects, each with the function's name and its arguments.

    A block is ``marker``, ``opening``, objects with ``joint`` between them, ``closing``.
    """

    marker: str
    opening: str
    closing: str
    joint: str | None = None  # None: a block has one object
    block_joint: str | None = None  # between blocks; None: a text has one of them
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_bare: bool = False  # a text that begins with an object is a block without a marker

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls, each a name and the JSON of its arguments, as the model writes them."""
        head = f'{{"{self.name_key}": %s, "{self.arguments_key}": %s}}'
        objects = [head % (json.dumps(name), arguments) for name, arguments in calls]
        if self.joint is not None:
            marker = "" if self.is_bare else self.marker
            return marker + self.opening + self.joint.join(objects) + self.closing
        return (self.block_joint or "\n").join(self.marker + self.opening + one + self.closing for one in objects)

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a block behind its marker."""
        yield from source.skip_space()
        yield from source.takes(self.opening.strip() or "[", "[")
        yield from source.skip_space()
        yield from read_objects(source, calls, self.closing.strip(), (self.joint or "").strip())


def read_objects(
    source: Source, calls: Calls, closing: str, joint: str = ",", *, is_sure: bool = True
) -> Reading[None]:
    """Read calls as objects, up to what closes them.

    Args:
        is_sure: a mark says that these are calls; else each needs its arguments.
    """
    while (yield from source.sees("{")):
        yield from _read_object(source, calls, is_sure=is_sure)
        yield from source.skip_space()
        if (yield from source.closes(closing)):
            return
        yield from source.takes(*{joint, ",", ";"} - {""})
        yield from source.skip_space()
    if not calls.num_calls:
        raise NoCallError
    yield from source.closes(closing)


def _read_object(source: Source, calls: Calls, *, is_sure: bool) -> Reading[None]:
    one = _Object(source, calls)
    source.take(1)
    while (yield from one.read_pair()):
        pass
    is_closed = yield from source.takes("}")
    if not one.has_begun:
        if not one.name or not is_closed or not (is_sure or one.arguments):
            raise NoCallError
        calls.begin(one.name)
        calls.add(one.arguments or "{}")
    if is_closed or not source.is_over or source.text:
        calls.end()


class _Object:
    """An object that may be a call, key by key; its arguments are given out as they come if its name is before them."""

    def __init__(self, source: Source, calls: Calls) -> None:
        self._source, self._calls = source, calls
        self.name, self.arguments, self.has_begun = "", "", False

    def read_pair(self) -> Reading[bool]:
        """Read a key and its value. Returns: whether another one follows. Raises: NoCallError."""
        source = self._source
        yield from source.skip_space()
        if not (yield from source.sees('"')):
            return False
        parts: list[str] = []
        if not (yield from source.string(parts.append)):
            return False
        key = _decoded("".join(parts))
        if not self.has_begun and key not in _KEYS:
            raise NoCallError
        yield from source.skip_space()
        if not (yield from source.takes(":")):
            return False
        yield from source.skip_space()
        is_whole = yield from (self._read_arguments() if key in _ARGUMENT_KEYS else self._read_other(key))
        yield from source.skip_space()
        return is_whole and (yield from source.takes(",")) is not None

    def _read_arguments(self) -> Reading[bool]:
        if not (yield from self._source.sees("{")):
            raise NoCallError
        if self.name and not self.has_begun:
            self._calls.begin(self.name)
            self.has_begun = True
            return (yield from self._source.value(self._calls.add))
        parts: list[str] = []
        is_whole = yield from self._source.value(parts.append)
        self.arguments = "".join(parts)
        return is_whole

    def _read_other(self, key: str) -> Reading[bool]:
        parts: list[str] = []
        is_whole = yield from self._source.value(parts.append)
        if key in _NAME_KEYS and not self.name:
            self.name = str(_decoded("".join(parts)))
            if self.name not in self._calls.tools:
                raise NoCallError
        return is_whole


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        raise NoCallError from None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """A name, a separator, and the arguments in JSON."""

    marker: str  # of a block
    separator: str  # between name and arguments
    begin: str = ""  # of each call in a block, behind the marker
    before_name: str = ""  # ends what stands before a name
    prefix: str = ""  # of names
    suffix: str = ""  # a pattern of what follows a name
    written_suffix: str = ""  # that suffix in a call that is forced; {n} is the call's number
    extra: str = ""  # may stand between name and separator, with a value of its own
    end: str = ""  # of each call
    closing: str = ""  # of a block

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a block behind its marker."""
        if self.begin and not (yield from self._begins(source)):
            raise NoCallError
        while True:
            if self.before_name:
                yield from self._skip_to_name(source)
            yield from source.skip_space()
            yield from source.takes(self.prefix)
            name = re.sub(self.suffix + r"\Z", "", (yield from source.name(re.compile(r"[\w.\-:]+"))).strip())
            yield from source.skip_space()
            if self.extra and (yield from source.takes(self.extra)):
                yield from source.name(_SPACED_NAME)
            yield from source.skip_space()
            if not (yield from source.takes(self.separator.strip())):
                raise NoCallError
            yield from source.skip_space()
            if not (yield from source.sees("{")):
                raise NoCallError
            calls.begin(name)
            if (yield from source.value(calls.add)) or source.text:
                calls.end()
            yield from source.skip_space()
            yield from source.closes(self.end.strip())
            if not self.begin or not (yield from self._begins(source)):
                break
        yield from source.skip_space()
        yield from source.closes(self.closing)

    def _begins(self, source: Source) -> Reading[bool]:
        yield from source.skip_space()
        return bool((yield from source.takes(self.begin)))

    def _skip_to_name(self, source: Source) -> Reading[None]:
        if not (yield from source.has(1)):
            raise NoCallError
        if (yield from source.sees(self.before_name)) is None:
            yield from source.name(_SPACED_NAME)
        if not (yield from source.takes(self.before_name)):
            raise NoCallError


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """A name and parameters between tags; the values are texts, or JSON where the schema says another type."""

    marker: str
    head: tuple[str, str]  # around the name; the second may be empty
    key: tuple[str, str]  # around a parameter's name
    value: tuple[str, str]  # around its value, behind the name
    end: str  # of a call
    closing: str  # of a block
    pads: str = ""  # stands on both sides of a value, and is none of it
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
            calls.begin(name)
            if (yield from self._read_parameters(source, calls, name)):
                calls.add("}")
                calls.end()
            yield from source.skip_space()
            if self.closing != self.end and (yield from source.closes(self.closing)):
                return
            if not self.has_several or not (yield from source.sees(self.head[0])):
                return

    def _read_parameters(self, source: Source, calls: Calls, name: str) -> Reading[bool]:
        """Read parameters as an object whose last brace is left out. Returns: whether the call ended."""
        properties = dict(calls.tools[name].get("properties") or {})
        calls.add("{")
        joint = ""
        while True:
            yield from source.skip_space()
            mark = yield from source.takes(self.key[0], self.end)
            if mark is None:
                return bool(source.text) or not source.is_over
            if mark == self.end:
                return True
            parts: list[str] = []
            if (yield from source.until([self.key[1]], parts.append)) is None:
                return False
            key = "".join(parts).strip()
            if self.value[0]:
                yield from source.skip_space()
                yield from source.takes(self.value[0])
            calls.add(f"{joint}{json.dumps(key, ensure_ascii=False)}: ")
            joint = ", "
            if not (yield from self._read_value(source, calls, properties.get(key))):
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


def is_text_only(schema: Any) -> bool:
    """Return whether a schema allows nothing but texts; without a schema a value may be anything."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None and isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return all(isinstance(one, str) for one in schema["enum"])
    return kind in ("string", ["string"])


def json_of(text: str, schema: Any) -> str:
    """Return a value that was written as text in JSON: as its schema says, else what it looks like."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
        return stripped if _fits(value, schema) else json.dumps(text, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    by_name = {"true": True, "false": False, "none": None, "null": None}
    if stripped.lower() in by_name and not is_text_only(schema):
        return json.dumps(by_name[stripped.lower()])
    if stripped.startswith(("{", "[", "(", "'")):
        try:
            value = ast.literal_eval(stripped)
            if _fits(value, schema):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _fits(value: Any, schema: Any) -> bool:
    """Return whether a value has one of the types that a schema names; it may name none."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds is None:
        return True
    names = [kinds] if isinstance(kinds, str) else kinds
    allowed = tuple(kind for name in names if isinstance(name, str) for kind in _TYPES.get(name, ()))
    return isinstance(value, allowed) if allowed else True


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
        found = yield from source.takes("{", "[", self.quote, '"')
        if found is None:
            parts: list[str] = []
            mark = yield from source.until([",", "}", "]", self.end], parts.append)
            source.text = (mark or "") + source.text
            emit(json_of("".join(parts), None))
            return mark is not None and mark != self.end
        if found in (self.quote, '"'):
            emit('"')
            closed = yield from source.until([found], lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]))
            emit('"' if closed else "")
            return closed is not None
        if depth > 64:
            return False
        emit(found)
        closing, joint = {"{": "}", "[": "]"}[found], ""
        while True:
            yield from source.skip_space()
            if (yield from source.closes(closing)):
                emit(closing)
                return True
            if joint and not (yield from source.takes(",")):
                return False
            yield from source.skip_space()
            emit(joint)
            if found == "{":
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
    parts: list[str] = []
    while (mark := (yield from source.until(["\\", quote], parts.append))) == "\\":
        yield from source.has(1)
        parts.append(mark + source.take(1))
    return "".join(parts) + (mark or "")


def _json_of_python(text: str, schema: Any) -> str:
    stripped = text.strip()
    try:
        return json.dumps(ast.literal_eval(stripped), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json_of(stripped, schema)
