"""Answers of a server, whole or streamed, of chat or completions, in one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from card.tools.verify_server.client import BrokenAnswerError


@dataclass(frozen=True, slots=True)
class Score:
    """A token with its log-probability, and the likeliest tokens at its place."""

    text: str
    raw: bytes  # of the token, which may be a part of a character
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class ServerAnswer:
    """One choice."""

    text: str = ""
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None  # None: the server does not report them
    scores: tuple[Score, ...] | None = None
    num_drafted: int | None = None  # draft tokens of the whole request, if the answer has them


# ---- the shapes of the API; other fields are ignored -----------------------------------------------------------------


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # of a reasoning model, beside the content
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _Top(msgspec.Struct):
    token: str
    logprob: float


class _Scored(_Top):
    bytes: list[int] | None = None
    top_logprobs: list[_Top] | None = None

    def score(self) -> Score:
        raw = self.token.encode() if self.bytes is None else bytes(self.bytes)
        return Score(self.token, raw, self.logprob, tuple((top.token, top.logprob) for top in self.top_logprobs or ()))


class _Logprobs(msgspec.Struct):
    content: list[_Scored] | None = None  # of chat
    tokens: list[str] = []  # of completions, like the following
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float] | None] | None = None

    def scores(self) -> tuple[Score, ...]:
        if self.content is not None:
            return tuple(one.score() for one in self.content)
        tops = self.top_logprobs or [None] * len(self.tokens)
        rows = zip(self.tokens, self.token_logprobs, tops, strict=True)
        return tuple(Score(token, token.encode(), logprob, tuple((top or {}).items())) for token, logprob, top in rows)


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Said | None = None
    delta: _Said | None = None
    text: str | None = None
    token_ids: list[int] | None = None  # vLLM
    tokens: list[Any] | None = None  # card serve
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None

    def add_to(self, answer: ServerAnswer) -> None:
        """Append this part of a choice to the answer."""
        said = self.message or self.delta
        answer.text += said.text if said is not None else self.text or ""
        ids = self.token_ids
        if ids is None and self.tokens is not None:
            ids = [one["token_id"] for one in self.tokens if isinstance(one, dict) and "token_id" in one]
        if ids is not None:
            answer.token_ids = (*(answer.token_ids or ()), *ids)
        if self.logprobs is not None:
            answer.scores = (*(answer.scores or ()), *self.logprobs.scores())
        answer.finish_reason = self.finish_reason or answer.finish_reason


class _Timings(msgspec.Struct):
    draft_n: int | None = None  # llama.cpp


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    timings: _Timings | None = None


def read_answers(events: Sequence[Mapping[str, Any]]) -> list[ServerAnswer]:
    """Return the choices of an answer, by their index. Raises: BrokenAnswerError.

    Args:
        events: those of a stream, or the one body of an answer that came as a whole.
    """
    found: dict[int, ServerAnswer] = {}
    num_drafted: int | None = None
    try:
        for event in (msgspec.convert(one, _Event) for one in events):
            num_drafted = (event.timings.draft_n if event.timings else None) or num_drafted
            for choice in event.choices or ():
                choice.add_to(found.setdefault(choice.index, ServerAnswer()))
    except ValueError as error:  # msgspec's are ValueErrors too
        raise BrokenAnswerError(f"the answer is not of the API's shape: {error}") from None
    if not found:
        raise BrokenAnswerError("the answer has no choices")
    if sorted(found) != list(range(len(found))):
        raise BrokenAnswerError(f"the choices of the answer are numbered {sorted(found)}, not from 0 on")
    answers = [answer for _, answer in sorted(found.items())]
    for answer in answers:
        answer.num_drafted = num_drafted
        if answer.finish_reason is None:
            raise BrokenAnswerError("the answer ends without a finish reason: it was cut off")
    return answers
