"""The form of an answer, as data: the marks where its parts begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from card.text.parts.calls import CallSyntax

Part = Literal["thoughts", "content", "between", "header"]
"""Begun by a mark: `between` is text that belongs to no part, `header` one that names the part behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The beginnings and ends of thoughts, content and calls that are messages of their own."""

    thoughts: tuple[str, str]  # begins them; ends them and begins the next message
    content: str  # begins it
    calls: str = ""  # begins calls
    call_header: str = ""  # begins one call; {name} is the function
    joint: str | None = None  # between calls with such headers; None: an answer has one
    recipient: str = ""  # before a function's name in a header
    thoughts_word: str = ""  # in a header of thoughts


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The marks where the parts of an answer begin and end.

    A mark that is an added token of a model counts only as that token, else as its text.
    """

    name: str
    thoughts: tuple[str, str] | None = None  # around what the model thinks, at the beginning of an answer
    wrapper: tuple[str, str] | None = None  # around the content, behind the thoughts
    turns: tuple[tuple[str, Part], ...] = ()  # further marks, and the parts that they begin
    header_end: str | None = None  # behind a header, which names a channel and perhaps a function
    starts_in: Part = "content"
    channels: Channels | None = None
    calls: CallSyntax | None = None
    begun: str = ""  # a mark that a prompt ends with: the answer goes on behind it
    thinks_unsaid: bool = False  # thinks, though the chat template does not have the marks as they are
    no_effort: str = "none"  # what the chat template calls a `reasoning_effort` without thoughts
    may_skip: bool = False  # an answer without thoughts may begin with the mark that ends them
    calls_end_thoughts: bool = False  # thoughts go over into calls without a mark of their own
    empty_content: tuple[str, str] | None = None  # may stand between thoughts and calls
    ends: tuple[str, ...] = ()  # tokens that all models of this family have
    keeps: tuple[str, ...] = ()  # end tokens that in these models end a part, and not the answer

    @property
    def writes_calls(self) -> bool:
        """True if answers can have calls."""
        return self.calls is not None or self.header_end is not None
