"""Text that arrives piece by piece, read by generators that wait where they need more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads a source; it stops at each point where it needs more text, and returns what it found."""

_JSON_PLAIN = re.compile(r'[^"{}\[\]]+')  # inside a value, but for strings
_JSON_ODD = re.compile(r"[^\s\w+\-.:,]")  # belongs to no JSON outside of a string
_JSON_STRING = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[-+.\w]+")
_MOST_DEPTH = 512  # of objects and lists within each other


class NoCallError(Exception):
    """The text is no call after all."""


class Source:
    """The text that has come and is not read yet, and what was read since `begin_try`."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False  # nothing more will come
        self.tried = ""

    def take(self, num_chars: int) -> str:
        """Read so many characters that have come."""
        taken, self.text = self.text[:num_chars], self.text[num_chars:]
        self.tried += taken
        return taken

    def more(self) -> Reading[bool]:
        """Wait for more text. Returns: False if nothing more will come."""
        size = len(self.text)
        while len(self.text) == size and not self.is_over:
            yield
        return len(self.text) > size

    def has(self, num_chars: int) -> Reading[bool]:
        """Wait for so many characters. Returns: whether they came."""
        while len(self.text) < num_chars:
            if not (yield from self.more()):
                return False
        return True

    def skip_space(self) -> Reading[str]:
        """Read white space and return it."""
        space = ""
        while True:
            space += self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or not (yield from self.more()):
                return space

    def sees(self, *marks: str) -> Reading[str | None]:
        """Return the longest of these marks that comes next, and read nothing of it; None if none does."""
        wanted = sorted(filter(None, marks), key=len, reverse=True)
        while True:
            for mark in wanted:
                if self.text.startswith(mark):
                    return mark
                if mark.startswith(self.text) and not self.is_over:
                    break  # it may still come
            else:
                return None
            if not (yield from self.more()):
                self.is_over = True

    def takes(self, *marks: str) -> Reading[str | None]:
        """Read the mark that comes next, if it is one of these, and return it."""
        mark = yield from self.sees(*marks)
        if mark is not None:
            self.take(len(mark))
        return mark

    def closes(self, mark: str) -> Reading[bool]:
        """Read a mark that closes what was read, or its beginning where the text ends with that."""
        mark_found = yield from self.takes(mark)
        if mark_found is None and mark and self.text and mark.startswith(self.text):
            self.take(len(self.text))
        return mark_found is not None

    def is_cut_off(self, *marks: str) -> bool:
        """Return whether the text is over where one of these marks may have begun."""
        return self.is_over and any(mark.startswith(self.text) for mark in marks)

    def until(self, marks: Sequence[str], emit: Callable[[str], None]) -> Reading[str | None]:
        """Give out the text before the first of some marks and read the mark; None at the end of the text.

        Of marks that begin together the longest counts.
        """
        while True:
            match = any_of(tuple(marks)).search(self.text) if marks else None
            if match is not None:
                held = _num_held(self.text[match.start() :], marks)
                if self.is_over or held < len(self.text) - match.start():
                    emit(self.take(match.start()))
                    self.take(len(match[0]))
                    return match[0]
                emit(self.take(match.start()))
            else:
                emit(self.take(len(self.text) - (0 if self.is_over else _num_held(self.text, marks))))
            if not (yield from self.more()):
                if not self.text:
                    return None
                self.is_over = True

    def name(self, pattern: re.Pattern[str], most: int = 256) -> Reading[str]:
        """Read what matches a pattern, which must not be empty and is followed by something else.

        Raises: NoCallError.
        """
        while True:
            match = pattern.match(self.text)
            if match is None and self.text:
                raise NoCallError
            if match is not None and (match.end() < len(self.text) or self.is_over or match.end() > most):
                if match.end() > most:
                    raise NoCallError
                return self.take(match.end())
            if not (yield from self.more()) and not self.text:
                raise NoCallError

    # ---- JSON -------------------------------------------------------------------------------------------------------

    def string(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Give out a JSON string with its quotes as it comes. Returns: whether it ended."""
        emit(self.take(1))
        while True:
            if not self.text and not (yield from self.more()):
                return False
            plain = _JSON_STRING.match(self.text)
            if plain is not None:
                emit(self.take(plain.end()))
            elif self.text[0] == '"':
                emit(self.take(1))
                return True
            elif (yield from self.has(2)):
                emit(self.take(2))
            else:
                return False

    def value(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Give out a JSON value as it comes. Returns: whether it ended.

        A value that is cut off by something that is no JSON ends there.
        """
        yield from self.has(1)
        if self.text.startswith('"'):
            return (yield from self.string(emit))
        if self.text.startswith(("{", "[")):
            return (yield from self._nested(emit))
        while (match := _SCALAR.match(self.text)) is not None and match.end() == len(self.text):
            if not (yield from self.more()):
                break
        emit(self.take(match.end() if match else 0))
        return match is not None

    def _nested(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Give out an object or a list as it comes. Returns: whether it ended."""
        depth = 0
        while self.text or (yield from self.more()):
            char = self.text[0]
            if char == '"':
                if not (yield from self.string(emit)):
                    return False
            elif char in "{[}]":
                depth += 1 if char in "{[" else -1
                emit(self.take(1))
                if not 0 < depth <= _MOST_DEPTH:
                    return depth == 0
            else:
                plain = _JSON_PLAIN.match(self.text)
                assert plain is not None
                odd = _JSON_ODD.search(plain[0])
                emit(self.take(odd.start() if odd else plain.end()))
                if odd:
                    return False
        return False


@cache
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the first of some marks, and of those that begin together the longest."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def _num_held(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a longer mark."""
    longest = max(map(len, marks), default=1)
    for num_chars in range(min(longest - 1, len(text)), 0, -1):
        end = text[-num_chars:]
        if any(len(mark) > num_chars and mark.startswith(end) for mark in marks):
            return num_chars
    return 0
