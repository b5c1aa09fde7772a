"""What a server said, whole or streamed, of chat or completions, in one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from card.verify_server.client import BrokenAnswerError


@dataclass(frozen=True, slots=True)
class Score:
    """A token with its log-probability, and the likeliest tokens at its place."""

    text: str
    raw: bytes | None  # None: the server does not tell
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice."""

    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...] | None = None  # None: the server does not tell
    scores: tuple[Score, ...] | None = None
    num_drafted: int | None = None  # draft tokens of the whole request, where an answer tells


def read_answer(body: Mapping[str, Any]) -> list[Answer]:
    """Return the choices of a whole answer, by their index. Raises: BrokenAnswerError."""
    return _merge([body])


def read_stream(events: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """Return the choices of a streamed answer, by their index. Raises: BrokenAnswerError."""
    return _merge(list(events))


@dataclass(slots=True)
class _Parts:
    """What has come of one choice."""

    texts: list[str]
    ids: list[int]
    scores: list[Score]
    tells_ids: bool = False
    tells_scores: bool = False
    finish_reason: str | None = None


def _merge(events: Sequence[Mapping[str, Any]]) -> list[Answer]:
    found: dict[int, _Parts] = {}
    num_drafted: int | None = None
    for event in events:
        num_drafted = _num_drafted(event) or num_drafted
        for choice in _list(event, "choices"):
            index = choice.get("index", 0) if isinstance(choice, dict) else None
            if type(index) is not int:
                raise BrokenAnswerError("the answer has a choice without a whole number as its index")
            _take(found.setdefault(index, _Parts([], [], [])), choice)
    if not found:
        raise BrokenAnswerError("the answer has no choices")
    if sorted(found) != list(range(len(found))):
        raise BrokenAnswerError(f"the choices of the answer are numbered {sorted(found)}, not from 0 on")
    answers = []
    for _, parts in sorted(found.items()):
        if parts.finish_reason is None:
            raise BrokenAnswerError("the answer ends without a finish reason: it was cut off")
        answers.append(
            Answer(
                text="".join(parts.texts),
                finish_reason=parts.finish_reason,
                token_ids=tuple(parts.ids) if parts.tells_ids else None,
                scores=tuple(parts.scores) if parts.tells_scores else None,
                num_drafted=num_drafted,
            )
        )
    return answers


def _take(parts: _Parts, choice: Mapping[str, Any]) -> None:
    said = choice.get("message", choice.get("delta"))
    if isinstance(said, dict):  # a model that reasons aloud has its reasoning beside the content
        parts.texts += [_text(said.get("reasoning_content") or said.get("reasoning")), _text(said.get("content"))]
    else:
        parts.texts.append(_text(choice.get("text")))
    if isinstance(choice.get("token_ids"), list):  # vLLM
        parts.ids += [int(one) for one in choice["token_ids"] if type(one) is int]
        parts.tells_ids = True
    elif isinstance(choice.get("tokens"), list):  # card serve
        parts.ids += [one["token_id"] for one in choice["tokens"] if isinstance(one, dict) and "token_id" in one]
        parts.tells_ids = True
    if isinstance(choice.get("logprobs"), dict):
        parts.scores += _scores(choice["logprobs"])
        parts.tells_scores = True
    reason = choice.get("finish_reason")
    if reason is not None:
        parts.finish_reason = str(reason)


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BrokenAnswerError(f"the text of the answer is no text but {type(value).__name__}")
    return value


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    value = content.get(name)
    return value if isinstance(value, list) else []


def _scores(told: Mapping[str, Any]) -> list[Score]:
    """Return the scores in chat's shape, or in that of completions."""
    try:
        if isinstance(told.get("content"), list):
            return [_score(entry) for entry in told["content"]]
        tops = told.get("top_logprobs") or [{}] * len(_list(told, "tokens"))
        rows = zip(_list(told, "tokens"), _list(told, "token_logprobs"), tops, strict=True)
        return [
            Score(str(token), None, float(logprob), tuple((str(k), float(v)) for k, v in (top or {}).items()))
            for token, logprob, top in rows
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BrokenAnswerError(f"the log-probabilities of the answer are not of the API's shape: {error!r}") from None


def _score(entry: Mapping[str, Any]) -> Score:
    raw = entry.get("bytes")
    return Score(
        text=str(entry["token"]),
        raw=bytes(raw) if isinstance(raw, list) else None,
        logprob=float(entry["logprob"]),
        top=tuple((str(one["token"]), float(one["logprob"])) for one in entry.get("top_logprobs") or ()),
    )


def _num_drafted(event: Mapping[str, Any]) -> int | None:
    """Return how many tokens were drafted, where llama.cpp tells."""
    timings = event.get("timings")
    count = timings.get("draft_n") if isinstance(timings, dict) else None
    return count if isinstance(count, int) else None
