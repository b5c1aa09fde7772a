"""Answers in Ollama's form: one JSON object, or a stream of them, a line each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from card.api.outputs import StreamChunk
from card.server.chat import content_logprobs
from card.server.errors import ApiError
from card.server.generation import Generation
from card.server.service import Service
from card.server.streaming import EventStream
from card.server.tool_schemas import decoded_arguments
from card.text.parts.pieces import CallArguments, CallBegun, Content, Piece, Thoughts

Said = dict[str, Any]
"""A piece of an answer: `content`, `thinking`, `tool_calls`, `logprobs`, or several of them."""

_encode = msgspec.json.Encoder().encode
_BLANK = b" "  # before a line of JSON; an empty line would be no JSON


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(content: object) -> bytes:
    """Return one line of a stream."""
    return _encode(content) + b"\n"


def failure(error: ApiError) -> bytes:
    """Return the line that ends a stream with an error."""
    return line({"error": str(error)})


class LineStream(EventStream):
    """Sends the text of a generation as lines of JSON."""

    def __init__(self, generation: Generation, lines: AsyncGenerator[bytes, None]) -> None:
        kind = "application/x-ndjson"
        super().__init__(generation, lines, tell=failure, end=b"", comment=_BLANK, media_type=kind)


@dataclass(slots=True)
class _Call:
    """A call that is being written."""

    idx: int
    name: str
    arguments: str = ""


class _Calls:
    """Turns pieces of an answer into what Ollama says of them. A call is said once it is whole."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._open: _Call | None = None

    def push(self, pieces: Iterable[Piece]) -> list[Said]:
        """Take pieces and return what is certain."""
        said: list[Said] = []
        for piece in pieces:
            match piece:
                case CallArguments(_, text):
                    assert self._open is not None
                    self._open.arguments += text
                    continue
                case CallBegun(call_idx, name):
                    said += self.finish()
                    self._open = _Call(call_idx, name)
                case Content(text):
                    said += [*self.finish(), {"content": text}]
                case Thoughts(text):
                    said += [*self.finish(), {"content": "", "thinking": text}]
        return said

    def finish(self, *, is_cut_off: bool = False) -> list[Said]:
        """End the open call and return it. Arguments that are no object, as after a cut, make it a text: in a call of
        this form they must be one.
        """
        call, self._open = self._open, None
        if call is None:
            return []
        arguments = decoded_arguments(call.arguments)
        if isinstance(arguments, str) or (is_cut_off and not call.arguments.strip()):
            text = f'{{"name": {_encode(call.name).decode()}, "arguments": {call.arguments}'
            return [{"content": text if is_cut_off else text + "}"}]
        function = {"index": call.idx, "name": call.name, "arguments": arguments}
        return [{"content": "", "tool_calls": [{"id": self._new_call_id(), "function": function}]}]


class Answer:
    """One answer in progress, of `/api/chat` or `/api/generate`."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        *,
        kind: Literal["chat", "generate"],
        model: str,
        new_call_id: Callable[[], str] = str,
        has_logprobs: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            new_call_id: makes the id of a call; without tools no call is read.
        """
        self._service, self._generation = service, generation
        self._kind, self._model, self._has_logprobs = kind, model, has_logprobs
        self._calls = _Calls(new_call_id)
        self._logprobs: list[Said] = []  # that are not sent yet

    def body(self) -> Said:
        """Return the whole answer, of a generation that is collected."""
        choice = self._generation.choices[0]
        whole: Said = {"content": ""}
        for chunk in choice.chunks:
            for one in self._said(chunk):
                for name, value in one.items():
                    whole[name] = whole[name] + value if name in whole else value
        return {**self._head(whole), **self._end(choice.finish_reason)}

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as lines; what arrives together is sent together."""
        reason = "length"
        async with contextlib.aclosing(self._generation.events()) as pieces:
            async for _, chunk in pieces:
                reason = chunk.finish_reason or reason
                if said := self._said(chunk):
                    yield b"".join(line({**self._head(one), "done": False}) for one in said)
        yield line({**self._head({"content": ""}), **self._end(reason)})

    def _said(self, chunk: StreamChunk) -> list[Said]:
        if self._has_logprobs:
            self._logprobs += self._service.names.chat_logprobs(content_logprobs(chunk))["content"]
        said = self._calls.push(chunk.parts)
        if chunk.finish_reason is not None:
            said += self._calls.finish(is_cut_off=chunk.finish_reason == "length")
        if self._logprobs and (said or chunk.finish_reason is not None):
            said = said or [{"content": ""}]
            said[0]["logprobs"], self._logprobs = self._logprobs, []
        return said

    def _head(self, said: Said) -> Said:
        head: Said = {"model": self._model, "created_at": now()}
        beside = {name: said[name] for name in ("logprobs",) if name in said}
        message = {name: value for name, value in said.items() if name not in beside}
        if self._kind == "chat":
            return {**head, "message": {"role": "assistant", **message}, **beside}
        return {**head, "response": message.pop("content"), **message, **beside}

    def _end(self, reason: str) -> Said:
        """Return the last fields: why the text ends, its numbers of tokens and its times in nanoseconds."""
        record, usage = self._generation.choices[0].record, self._generation.usage()
        started_at = record.started_at or record.arrived_at
        times = {
            "total_duration": time.perf_counter() - record.arrived_at,
            "prompt_eval_duration": started_at - record.arrived_at,
            "eval_duration": record.last_at - started_at,
        }
        lasted = {name: max(1, round(seconds * 1e9)) for name, seconds in times.items()}  # clients divide by them
        return {
            "done": True,
            "done_reason": reason,
            "load_duration": 0,
            **lasted,
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            **({} if self._service.llm.is_exact else {"exact": False}),
            **self._generation.metrics(),
        }
