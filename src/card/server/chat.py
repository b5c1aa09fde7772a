"""`POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.api.outputs import StreamChunk
from card.server.answers import json_response, metrics, new_head, told_of_tokens, unless_gone, usage
from card.server.limits import read_body
from card.server.params import sampling_params
from card.server.schemas import ChatRequest
from card.server.service import Choice, Generation, Service
from card.server.streaming import EventStream, event
from card.server.tools.parser import CallArguments, CallBegun, Content, Piece
from card.server.tools.support import ToolPlan
from card.tree.sampling import TokenLogprobs


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    fields = await read_body(request, ChatRequest, service.settings.max_request_bytes)
    model = service.check_model(fields.model)
    plan = service.tools.plan(fields)
    generation = await start_chat(request, service, fields, plan)
    if fields.stream:
        head = new_head("chatcmpl", "chat.completion.chunk", model, service)
        return EventStream(generation, _events(service, fields, plan, generation, head))
    try:
        await unless_gone(request, generation.collect())
    finally:
        await generation.close()
    head = new_head("chatcmpl", "chat.completion", model, service)
    choices = [_choice(service, fields, plan, choice) for choice in generation.choices]
    tail = metrics(fields, generation.choices, service)
    return json_response({**head, "choices": choices, "usage": usage(generation.choices, fields.n), **tail})


async def start_chat(request: Request, service: Service, fields: ChatRequest, plan: ToolPlan) -> Generation:
    """Queue the texts that answer a conversation. Raises: ApiError, PromptError, SettingsError, WorkerError."""
    prompt_ids = await service.encode(plan.conversation)
    params = sampling_params(
        fields,
        service.defaults,
        max_tokens=service.num_new_tokens(len(prompt_ids), fields.max_completion_tokens or fields.max_tokens),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        vocab_size=service.vocab_size,
    ).replace(grammar=plan.grammar, shown_token_ids=plan.shown_ids)
    await service.prepare(prompt_ids, params, plan.grammar_param)
    generation = service.start(fields, [(prompt_ids, params)])
    request.state.generation = generation
    return generation


def finish_reason(reason: str | None, num_calls: int) -> str | None:
    """Return why an answer ends, as OpenAI has it: with calls, unless it was cut off."""
    return "tool_calls" if num_calls and reason == "stop" else reason


def _choice(service: Service, fields: ChatRequest, plan: ToolPlan, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    parser, calls = plan.parser(), []
    if parser is not None:
        pieces = [*parser.push(choice.text), *parser.flush()]
        calls = [_call(plan, piece, pieces) for piece in pieces if isinstance(piece, CallBegun)]
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        message["content"] = content if content or not calls else None
    if calls:
        message["tool_calls"] = calls
    told: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason(choice.finish_reason, len(calls)),
    }
    if fields.logprobs:
        logprobs = [token for chunk in choice.chunks for token in chunk.logprobs]
        told["logprobs"] = service.names.chat_logprobs(logprobs)
    if fields.shows_tree:
        told["tokens"] = told_of_tokens(choice.chunks, service.names)
    return told


def _call(plan: ToolPlan, call: CallBegun, pieces: Sequence[Piece]) -> dict[str, Any]:
    own = [one for one in pieces if isinstance(one, CallArguments) and one.call_idx == call.call_idx]
    arguments = "".join(one.text for one in own)
    return {"id": plan.new_call_id(), "type": "function", "function": {"name": call.name, "arguments": arguments}}


class _Writer:
    """Makes the events of one choice out of what is written."""

    def __init__(self, service: Service, fields: ChatRequest, plan: ToolPlan, head: dict[str, Any]) -> None:
        self._service, self._fields, self._plan, self._head = service, fields, plan, head
        self._parser = plan.parser()
        self._has_begun = False
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text has not come yet

    def events(self, choice: Choice, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk."""
        begin = b"" if self._has_begun else self._event(choice, {"role": "assistant", "content": ""}, None)
        self._has_begun = True
        self._logprobs += chunk.logprobs
        is_end = chunk.finish_reason is not None
        deltas = self._deltas(chunk.text, is_end=is_end)
        if not deltas and not is_end and not self._fields.shows_tree:
            return begin
        reason = finish_reason(chunk.finish_reason, self._parser.num_calls if self._parser is not None else 0)
        told: dict[str, Any] = {}  # comes with the first event, the reason with the last one
        if self._fields.logprobs:
            told["logprobs"] = self._service.names.chat_logprobs(self._logprobs)
            self._logprobs = []
        if self._fields.shows_tree:
            told["tokens"] = told_of_tokens([chunk], self._service.names)
        deltas = deltas or [{}]
        reasons = [None] * (len(deltas) - 1) + [reason]
        tolds = [told] + [{}] * (len(deltas) - 1)
        parts = zip(deltas, reasons, tolds, strict=True)
        return begin + b"".join(self._event(choice, delta, one, **extra) for delta, one, extra in parts)

    def _deltas(self, text: str, *, is_end: bool) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": text}] if text else []
        pieces = [*self._parser.push(text), *(self._parser.flush() if is_end else ())]
        return [self._delta(piece) for piece in pieces]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Content(text):
                return {"content": text}
            case CallBegun(call_idx, name):
                function = {"name": name, "arguments": ""}
                call = {"index": call_idx, "id": self._plan.new_call_id(), "type": "function", "function": function}
            case CallArguments(call_idx, text):
                call = {"index": call_idx, "function": {"arguments": text}}
        return {"tool_calls": [call]}

    def _event(self, choice: Choice, delta: dict[str, Any], reason: str | None, **told: Any) -> bytes:
        content = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason, **told}
        return event({**self._head, "choices": [content]})


async def _events(
    service: Service, fields: ChatRequest, plan: ToolPlan, generation: Generation, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events; what comes together is sent together."""
    writers = [_Writer(service, fields, plan, head) for _ in generation.choices]
    async with contextlib.aclosing(generation.events()) as pieces:
        async for choice, chunk in pieces:
            told = writers[choice.index].events(choice, chunk)
            if told:
                yield told
    tail = metrics(fields, generation.choices, service)
    if fields.includes_usage or tail:
        counted = {"usage": usage(generation.choices, fields.n)} if fields.includes_usage else {}
        yield event({**head, "choices": [], **counted, **tail})
