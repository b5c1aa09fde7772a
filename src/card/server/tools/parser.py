"""Tool calls read from a text while it is written, however it is split into pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec
from pydantic_core import from_json

from card.server.tools.formats import ToolFormat

_DECODER = json.JSONDecoder()
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*(?:"([^"\\]*)("?)|($))')
_FENCE = re.compile(r"```(?:json)?[ \t]*\n\s*")
_FENCE_BEGUN = re.compile(r"`{1,3}|```j(?:s(?:on?)?)?|```(?:json)?[ \t]*(?:\n\s*)?")
_KEYS = ("name", "arguments", "parameters", "type", "id")


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a function; its arguments follow."""

    call_idx: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON of a call's arguments."""

    call_idx: int
    text: str


Piece = Content | CallBegun | CallArguments


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _end_of_object(text: str) -> int | None:
    """Return where the JSON object that ``text`` begins with ends; None if it may go on. Raises: ValueError if not."""
    try:
        return _DECODER.raw_decode(text)[1]
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        from_json(text.encode("utf-8", "replace"), allow_partial=True)
        return None


class ToolParser:
    """Turns the text of one answer into content and calls.

    The result does not depend on how the text is split into pieces. Text that begins like a call but is none (invalid
    JSON, a function that was not offered, no end) is content. White space around calls is dropped. A call without marks
    counts only at the beginning of an answer.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        is_held_to_grammar: bool = False,
        has_content: bool = True,
        most_calls: int | None = None,
    ) -> None:
        """Begin.

        Args:
            names: functions that may be called.
            is_held_to_grammar: text that begins like a call is a call, so its arguments are given out as they come;
                otherwise a call is held back until it is complete.
            has_content: False if the grammar allows only calls; the beginning of a call is not content then.
            most_calls: text after as many calls is left out.
        """
        self._format, self._names = form, names
        self._is_live, self._has_content, self._most_calls = is_held_to_grammar, has_content, most_calls
        # Some models omit the marks, or write a block of code instead; a grammar makes them write the marks.
        self._takes_bare = form.is_bare or not is_held_to_grammar
        self._closing = form.closing.strip()
        self._is_marked = False
        self._decide: Callable[[], bool] = self._at_start if self._takes_bare else self._in_text
        self._rest = ""  # text that is not decided on yet
        self._before = ""  # white space, marker and opening before an object that may not be a call
        self._arguments_start: int | None = None  # in the rest, for a call that is given out while it grows
        self._num_given = 0  # characters of these arguments
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        self._rest += text
        while self._decide():
            pass
        return self._pop_pieces()

    def flush(self) -> list[Piece]:
        """Return the rest, after the last text."""
        is_cut_off = self._is_live and self._format.marker in self._before  # the beginning of a call, and nothing else
        if self._arguments_start is None and self._decide != self._after_object and not is_cut_off:
            self._add_content(self._before + self._rest)
        self._rest = self._before = ""
        return self._pop_pieces()

    def _pop_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _add_content(self, text: str) -> None:
        if text and self._has_content:
            self._pieces.append(Content(text))

    # ---- states: each handles the beginning of the rest, and returns whether to go on at once -----------------------

    def _at_start(self) -> bool:
        """Before the first character that is not white space."""
        text = self._rest.lstrip()
        fence = None if self._is_live else _FENCE.match(text)
        if fence and text.startswith("{", fence.end()):
            self._closing = "```"
            return self._begin_object(text[fence.end() :])
        if text.startswith("{"):
            return self._begin_object(text)
        may_be_fence = not self._is_live and _FENCE_BEGUN.fullmatch(text) is not None
        return bool(text) and not may_be_fence and self._enter(self._in_text)

    def _in_text(self) -> bool:
        """Outside of all blocks."""
        text, marker = self._rest, self._format.marker
        start = text.find(marker)
        if start >= 0:
            kept, behind = text[:start].rstrip(), start + len(marker)
            self._add_content(kept)
            self._before, self._rest = text[len(kept) : behind], text[behind:]
            self._is_marked, self._closing = True, self._format.closing.strip()
            return self._enter(self._before_object)
        num_held = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
        kept = text[: len(text) - num_held].rstrip()
        self._add_content(kept)
        self._rest = text[len(kept) :]
        return False

    def _before_object(self) -> bool:
        """After a marker."""
        text = self._rest.lstrip().removeprefix(self._format.opening.strip()).lstrip()
        if text.startswith("{"):
            return self._begin_object(text)
        return bool(text) and self._give_up()

    def _begin_object(self, text: str) -> bool:
        self._before += self._rest[: len(self._rest) - len(text)]
        self._rest = text
        return self._enter(self._in_object)

    def _in_object(self) -> bool:
        """Inside a possible call."""
        try:
            end = _end_of_object(self._rest)
        except ValueError:
            return self._give_up()
        if self._is_live and self._arguments_start is None:
            self._find_head()
        if self._arguments_start is not None:
            self._give_arguments(self._rest[self._arguments_start :])
        else:
            may_be_call = self._is_marked or _may_name_a_function(self._rest)
            if not may_be_call or (end is not None and not self._read_call(self._rest[:end])):
                return self._give_up()
        if end is None:
            return False
        self._rest, self._arguments_start = self._rest[end:], None
        is_last = self.num_calls == self._most_calls
        return self._enter(self._skip_rest if is_last else self._after_object)

    def _after_object(self) -> bool:
        """After a call: before the next one of its block, or the block's end."""
        text, joint, closing = self._rest.lstrip(), (self._format.joint or "").strip(), self._closing
        if not text or (closing != text and closing.startswith(text)):
            return False
        if closing and text.startswith(closing):
            self._rest = text.removeprefix(closing)
            return self._enter(self._after_block)
        following = text.removeprefix(joint).lstrip()
        if joint and not following:
            return False
        if following.startswith("{") and (self._takes_bare or (joint and text.startswith(joint))):
            return self._begin_object(following)
        return self._enter(self._after_block)

    def _after_block(self) -> bool:
        """After a block: white space is ignored."""
        self._rest = self._rest.lstrip()
        return bool(self._rest) and self._enter(self._in_text)

    def _skip_rest(self) -> bool:
        """After the last wanted call."""
        self._rest = ""
        return False

    def _enter(self, state: Callable[[], bool]) -> bool:
        self._decide = state
        return True

    def _give_up(self) -> bool:
        """Treat a failed call as content, in which the next call may begin."""
        self._add_content(self._before)
        if self._arguments_start is not None:  # the part that was given out stays a call
            self._rest, self._arguments_start = self._rest[self._arguments_start + self._num_given :], None
        self._before = ""
        return self._enter(self._in_text)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _find_head(self) -> None:
        """Begin a call under a grammar as soon as its name is known."""
        head = _HEAD.match(self._rest)
        name = _decoded_name(head[1]) if head else None
        if head and name in self._names:
            assert name is not None
            self._pieces.append(CallBegun(self.num_calls, name))
            self.num_calls += 1
            self._arguments_start, self._num_given = head.end(), 0
            self._before = ""

    def _give_arguments(self, text: str) -> None:
        piece = text[self._num_given : _end_of_object(text)]
        if piece:
            self._pieces.append(CallArguments(self.num_calls - 1, piece))
            self._num_given += len(piece)

    def _read_call(self, text: str) -> bool:
        """Read a complete object; return whether it is a call."""
        try:
            call = msgspec.json.decode(text, type=_Call)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return False
        raw = call.arguments if call.arguments is not msgspec.UNSET else call.parameters
        arguments = "{}" if isinstance(raw, msgspec.UnsetType) else bytes(raw).decode()
        is_sure = self._is_marked or raw is not msgspec.UNSET
        if call.name not in self._names or not arguments.startswith("{") or not is_sure:
            return False
        self._pieces += [CallBegun(self.num_calls, call.name), CallArguments(self.num_calls, arguments)]
        self.num_calls += 1
        self._before = ""
        return True


def pieces_of(parser: ToolParser | None, text: str, *, is_end: bool = False) -> list[Piece]:
    """Return the pieces of the next text, parsed if there is a parser, and at the end the text held back."""
    if parser is None:
        return [Content(text)] if text else []
    return [*parser.push(text), *(parser.flush() if is_end else ())]


def _may_name_a_function(text: str) -> bool:
    """Return whether an object without a mark may be a call, judging by its first key so far."""
    key = _FIRST_KEY.match(text)
    if key is None:
        return False
    name, is_whole = key[1] or "", bool(key[2])
    return name in _KEYS if is_whole else any(one.startswith(name) for one in _KEYS)


def _decoded_name(quoted: str) -> str | None:
    try:
        return msgspec.json.decode(quoted, type=str)
    except msgspec.DecodeError:
        return None
