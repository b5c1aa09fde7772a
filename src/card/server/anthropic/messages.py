"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, over the path of chat completions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.api.outputs import StreamChunk
from card.server.answers import event, json_response
from card.server.anthropic.errors import message_error
from card.server.anthropic.schemas import CountRequest, MessagesRequest
from card.server.bodies import read_body, run_apart
from card.server.chat import count_prompt_tokens, start_chat
from card.server.errors import ApiError
from card.server.generation import Generation
from card.server.service import Service
from card.server.streaming import EventStream
from card.server.tool_schemas import decoded_arguments
from card.server.tools.support import ToolPlan
from card.text.parts.pieces import CallArguments, CallBegun, Content, Piece, Thoughts

Events = list[dict[str, Any]]
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'  # for clients that look for events, not for bytes


async def messages(request: Request) -> Response:
    """Answer a conversation with text, thoughts and calls."""
    service: Service = request.app.state.service
    fields = await read_body(request, MessagesRequest)
    model = service.check_model(fields.model)
    chat = await run_apart(request, fields.as_chat)
    if chat.thinking_budget is not None and not service.tools.limits_thoughts:
        chat = chat.model_copy(update={"thinking_budget": None})  # a wish of each client, also where none can think
    plan = await run_apart(request, service.tools.plan, chat)
    generation = await start_chat(request, service, chat, plan, has_thoughts=True)
    answer = _Answer(plan, generation, model)
    if fields.stream:
        return EventStream(generation, answer.events(), tell=_failure, end=b"", comment=_PING)
    await generation.collect(request)
    for chunk in generation.choices[0].chunks:
        answer.push(chunk)
    return json_response(answer.body())


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation as the model would read it."""
    service: Service = request.app.state.service
    fields = await read_body(request, CountRequest)
    service.check_model(fields.model)
    chat = await run_apart(request, fields.as_chat)
    return json_response({"input_tokens": await count_prompt_tokens(request, service, chat)})


class _Answer:
    """One message in progress: its blocks, and what their growth tells a stream."""

    def __init__(self, plan: ToolPlan, generation: Generation, model: str) -> None:
        self._plan, self._generation, self._model = plan, generation, model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # the last block may still grow
        self._arguments = ""  # of the call that is open
        self._reason: str | None = None
        self._stop: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the message as it is now."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": self._usage(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the message as typed events; what arrives together is sent together."""
        yield _event({"type": "message_start", "message": self.body()})
        async with contextlib.aclosing(self._generation.events()) as pieces:
            async for _, chunk in pieces:
                if events := self.push(chunk):
                    yield b"".join(map(_event, events))
        reason = {"stop_reason": self._reason, "stop_sequence": self._stop}
        yield _event({"type": "message_delta", "delta": reason, "usage": self._usage()})
        yield _event({"type": "message_stop"})

    def push(self, chunk: StreamChunk) -> Events:
        """Add what a chunk says; return its events."""
        events = [one for piece in chunk.parts for one in self._grow(piece)]
        if chunk.finish_reason is None:
            return events
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        self._stop = chunk.stop or None
        if chunk.finish_reason == "length":
            self._reason = "max_tokens"
        else:
            self._reason = "stop_sequence" if self._stop else "tool_use" if has_calls else "end_turn"
        return [*events, *self._end_block()]

    def _grow(self, piece: Piece) -> Iterable[dict[str, Any]]:
        match piece:
            case Content(text):
                yield from self._begin_unless("text", {"text": ""})
                self._blocks[-1]["text"] += text
                yield self._delta("text_delta", text=text)
            case Thoughts(text):
                yield from self._begin_unless("thinking", {"thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += text
                yield self._delta("thinking_delta", thinking=text)
            case CallBegun(_, name):
                yield from self._end_block()
                yield self._begin("tool_use", {"id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}})
            case CallArguments(_, text):
                self._arguments += text
                yield self._delta("input_json_delta", partial_json=text)

    def _begin_unless(self, kind: str, block: dict[str, Any]) -> Events:
        """Begin a block unless one of this kind is open."""
        if self._is_open and self._blocks[-1]["type"] == kind:
            return []
        return [*self._end_block(), self._begin(kind, block)]

    def _begin(self, kind: str, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append({"type": kind, **block})
        self._is_open, self._arguments = True, ""
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {"type": kind, **block}}

    def _end_block(self) -> Events:
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        events = []
        if block["type"] == "tool_use":
            arguments = decoded_arguments(self._arguments)
            block["input"] = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        if block["type"] == "thinking":
            events.append(self._delta("signature_delta", signature=""))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, **fields}}

    def _usage(self) -> dict[str, int]:
        """Return the numbers of tokens; those of the prompt that were read before count apart."""
        counted = self._generation.usage()
        num_cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": counted["completion_tokens"],
        }


def _event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\n".encode() + event(content)


def _failure(error: ApiError) -> bytes:
    """Return the event that ends a stream with an error."""
    return _event(message_error(error))
