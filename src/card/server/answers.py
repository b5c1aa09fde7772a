"""The parts that answers to completions and to chat completions have in common."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from card.api.outputs import StreamChunk
from card.server.errors import ApiError
from card.server.metrics import request_metrics
from card.server.schemas import SamplingFields
from card.server.service import Choice, Service
from card.server.tokens import TokenNames

T = TypeVar("T")

_GONE = 499  # status in the log of a request whose client did not wait for the answer, as nginx has it

_encode = msgspec.json.Encoder().encode


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    return Response(_encode(content), status, headers, "application/json")


def new_head(prefix: str, kind: str, model: str, service: Service) -> dict[str, Any]:
    """Return what every answer, and every event of a stream, begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": service.fingerprint,
    }


def usage(choices: Sequence[Choice], num_choices_per_prompt: int) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt counts once, however many texts were written to it."""
    prompts = choices[::num_choices_per_prompt]
    num_prompt = sum(len(choice.prompt_ids) for choice in prompts)
    num_new = sum(choice.record.stats.num_new_tokens for choice in choices)
    cached = sum(choice.record.stats.reused_prompt_tokens for choice in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics(fields: SamplingFields, choices: Sequence[Choice], service: Service) -> dict[str, Any]:
    """Return the `metrics` of an answer, if it is to have them: {} or {"metrics": ...}."""
    if not fields.include_metrics and service.settings.spec_metrics == "none":
        return {}
    budget = service.llm.host.draft_settings.budget
    found = request_metrics([choice.record for choice in choices if choice.stream is not None], budget)
    return {"metrics": found}


def told_of_tokens(chunks: Sequence[StreamChunk], names: TokenNames) -> list[dict[str, Any]]:
    """Return where each token came from and which candidates lay beside it (`shows_tree`)."""
    told = []
    for chunk in chunks:
        for idx, token_id in enumerate(chunk.token_ids):
            beside = chunk.alternatives[idx] if idx < len(chunk.alternatives) else ()
            told.append(
                {
                    "token_id": token_id,
                    "text": names.text(token_id),
                    "origin": chunk.origins[idx] if idx < len(chunk.origins) else "",
                    "alternatives": [
                        {"token_id": other, "text": names.text(other), "path_logprob": logprob, "writer": writer}
                        for other, logprob, writer in beside
                    ],
                }
            )
    return told


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` gives; give it up if the client hangs up meanwhile.

    Raises: ApiError then, which nobody reads, and whatever ``work`` raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(_GONE, "the client has hung up", code="client_gone")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
