"""Ways in which models write calls: one small parser for each, and what it is called with as data.

A parser is entered behind the marker that begins a block of calls. It raises `NoCallError` as long as nothing tells
that there is a call of an offered function; from then on the call is given out as it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from card.text.parts.pieces import CallArguments, CallBegun, Piece, Tools
from card.text.parts.source import NoCallError, Reading, Source

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
        """The mark that begins a block of calls, anywhere in an answer."""

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
    is_doubled = yield from source.takes("{")  # as Qwen2.5-Coder's template shows a call
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
    if is_doubled:
        yield from source.takes("}")


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
class KeyedCalls:
    """A list of JSON objects with one key each: the function's name, whose value is its arguments."""

    marker: str
    closing: str

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Read a block behind its marker."""
        yield from source.skip_space()
        yield from source.takes("[")
        while True:
            yield from source.skip_space()
            if not (yield from source.takes("{")):
                raise NoCallError
            yield from source.skip_space()
            parts: list[str] = []
            if not (yield from source.sees('"')) or not (yield from source.string(parts.append)):
                raise NoCallError
            yield from source.skip_space()
            if not (yield from source.takes(":")):
                raise NoCallError
            yield from source.skip_space()
            if not (yield from source.sees("{")):
                raise NoCallError
            calls.begin(str(_decoded("".join(parts))))
            if (yield from source.value(calls.add)) or source.text:
                calls.end()
            yield from source.skip_space()
            yield from source.takes("}")
            yield from source.skip_space()
            if not (yield from source.takes(",")):
                break
        yield from source.takes("]")
        yield from source.skip_space()
        yield from source.closes(self.closing)


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
            space = yield from source.skip_space()
            if self.extra and (yield from source.takes(self.extra)):
                yield from source.name(_SPACED_NAME)
            yield from source.skip_space()
            separator = self.separator.strip()
            if not ((yield from source.takes(separator)) if separator else self.separator in space):
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
