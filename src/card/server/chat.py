"""`POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.outputs import StreamChunk
from card.sampling import TokenLogprobs
from card.server.answers import json_response, metrics, new_head, told_of_tokens, unless_gone, usage
from card.server.limits import read_body
from card.server.params import sampling_params
from card.server.schemas import ChatRequest
from card.server.service import Choice, Generation, Service
from card.server.streaming import EventStream, event


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    fields = await read_body(request, ChatRequest, service.settings.max_request_bytes)
    model = service.check_model(fields.model)
    messages: list[Mapping[str, str]] = [one.model_dump(exclude_none=True) for one in fields.messages]
    prompt_ids = await service.encode(messages)
    params = sampling_params(
        fields,
        service.defaults,
        max_tokens=service.num_new_tokens(len(prompt_ids), fields.max_completion_tokens or fields.max_tokens),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        vocab_size=service.vocab_size,
    )
    await service.prepare(prompt_ids, params)
    generation = service.start(fields, [(prompt_ids, params)])
    request.state.generation = generation
    if fields.stream:
        head = new_head("chatcmpl", "chat.completion.chunk", model, service)
        return EventStream(generation, _events(service, fields, generation, head))
    try:
        await unless_gone(request, generation.collect())
    finally:
        await generation.close()
    head = new_head("chatcmpl", "chat.completion", model, service)
    choices = [_choice(service, fields, choice) for choice in generation.choices]
    tail = metrics(fields, generation.choices, service)
    return json_response({**head, "choices": choices, "usage": usage(generation.choices, fields.n), **tail})


def _choice(service: Service, fields: ChatRequest, choice: Choice) -> dict[str, Any]:
    content: dict[str, Any] = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None,
        "finish_reason": choice.finish_reason,
    }
    if fields.logprobs:
        told = [token for chunk in choice.chunks for token in chunk.logprobs]
        content["logprobs"] = service.names.chat_logprobs(told)
    if fields.shows_tree:
        content["tokens"] = told_of_tokens(choice.chunks, service.names)
    return content


async def _events(
    service: Service, fields: ChatRequest, generation: Generation, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events; what comes together is sent together."""
    has_begun: set[int] = set()
    held_back: dict[int, list[TokenLogprobs]] = {}  # of tokens whose text has not come yet
    async with contextlib.aclosing(generation.events()) as pieces:
        async for choice, chunk in pieces:
            first = b""
            if choice.index not in has_begun:
                has_begun.add(choice.index)
                first = event({**head, "choices": [_delta(choice, {"role": "assistant", "content": ""}, None)]})
            logprobs = [*held_back.pop(choice.index, ()), *chunk.logprobs]
            if not chunk.text and chunk.finish_reason is None and not fields.shows_tree:
                held_back[choice.index] = logprobs
                if first:
                    yield first
                continue
            content = _delta(choice, {"content": chunk.text} if chunk.text else {}, chunk)
            if fields.logprobs:
                content["logprobs"] = service.names.chat_logprobs(logprobs)
            if fields.shows_tree:
                content["tokens"] = told_of_tokens([chunk], service.names)
            yield first + event({**head, "choices": [content]})
    tail = metrics(fields, generation.choices, service)
    if fields.includes_usage or tail:
        counted = {"usage": usage(generation.choices, fields.n)} if fields.includes_usage else {}
        yield event({**head, "choices": [], **counted, **tail})


def _delta(choice: Choice, delta: dict[str, Any], chunk: StreamChunk | None) -> dict[str, Any]:
    reason = chunk.finish_reason if chunk is not None else None
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}
