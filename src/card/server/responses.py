"""`POST /v1/responses`: text and function calls in the shape of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.errors import CardError
from card.server.answers import json_response, metrics, unless_gone, usage
from card.server.chat import start_chat
from card.server.errors import as_api_error
from card.server.limits import read_body
from card.server.response_items import OutputItems
from card.server.response_schemas import FunctionTool, ResponsesRequest
from card.server.schemas import ChatRequest
from card.server.service import Generation, Service
from card.server.streaming import EventStream, event
from card.server.tools.support import ToolPlan


async def responses(request: Request) -> Response:
    """Answer what was said, with text or calls of functions."""
    service: Service = request.app.state.service
    fields = await read_body(request, ResponsesRequest, service.settings.max_request_bytes)
    model = service.check_model(fields.model)
    chat = fields.as_chat()
    plan = service.tools.plan(chat)
    generation = await start_chat(request, service, chat, plan)
    answer = _Answer(service, fields, chat, plan, generation, model)
    if fields.stream:
        return EventStream(generation, answer.events(), tell=answer.failure, end=b"")
    try:
        await unless_gone(request, generation.collect())
    finally:
        await generation.close()
    choice = generation.choices[0]
    answer.items.push(choice.text)
    answer.finish(choice.finish_reason)
    return json_response(answer.body())


class _Answer:
    """One response as it comes to be."""

    def __init__(
        self,
        service: Service,
        fields: ResponsesRequest,
        chat: ChatRequest,
        plan: ToolPlan,
        generation: Generation,
        model: str,
    ) -> None:
        self._service, self._fields, self._chat, self._generation = service, fields, chat, generation
        self._model = model
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created_at = int(time.time())
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        self._num_events = 0
        self.items = OutputItems(plan)

    def finish(self, reason: str) -> list[dict[str, Any]]:
        """End the output; return the last events but one."""
        self._status = "incomplete" if reason == "length" else "completed"
        return self.items.finish(is_complete=self._status == "completed")

    def body(self) -> dict[str, Any]:
        """Return the response as it is now."""
        fields = self._fields
        is_over = self._status != "in_progress"
        choices = self._generation.choices
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._model,
            "output": self.items.items if is_over else [],
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": fields.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._choice(),
            "tools": [_told_of(tool) for tool in fields.tools],
            "top_p": fields.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": fields.user or None,
            "metadata": fields.metadata,
            **(metrics(self._chat, choices, self._service) if is_over else {}),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as typed events; what comes together is sent together."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self.body()})
        async with contextlib.aclosing(self._generation.events()) as pieces:
            async for _, chunk in pieces:
                told = self.items.push(chunk.text)
                if chunk.finish_reason is not None:
                    told += self.finish(chunk.finish_reason)
                if told:
                    yield b"".join(map(self._event, told))
        yield self._event({"type": f"response.{self._status}", "response": self.body()})

    def failure(self, error: CardError) -> bytes:
        """Return the event that ends a stream with an error."""
        self._status, self._error = "failed", {"code": "server_error", "message": str(as_api_error(error))}
        return self._event({"type": "response.failed", "response": self.body()})

    def _event(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {content['type']}\n".encode() + event(numbered)

    def _usage(self) -> dict[str, Any]:
        counted = usage(self._generation.choices, 1)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }

    def _format(self) -> dict[str, Any]:
        form = self._fields.text.format
        return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)

    def _choice(self) -> object:
        choice = self._fields.tool_choice
        return {"type": "function", "name": choice["function"]["name"]} if isinstance(choice, dict) else choice


def _told_of(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
