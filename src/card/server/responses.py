"""`POST /v1/responses` and `/v1/responses/input_tokens`, in the shape of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

import contextlib
import copy
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.server.answers import event, json_response
from card.server.bodies import read_body, run_apart
from card.server.chat import count_prompt_tokens, start_chat
from card.server.custom_tools import CustomTool, InputText
from card.server.errors import ApiError
from card.server.generation import Generation
from card.server.response_schemas import FunctionTool, ResponsesRequest
from card.server.service import Service
from card.server.streaming import EventStream
from card.server.tools.support import ToolPlan
from card.text.parts.pieces import CallArguments, CallBegun, Content, Piece, Thoughts

Events = list[dict[str, Any]]
_ECHOED = {"instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "top_p"}  # as requested
_SAME_IN_ALL: dict[str, Any] = {
    "object": "response",
    "error": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


async def responses(request: Request) -> Response:
    """Answer the input with text or function calls."""
    service: Service = request.app.state.service
    fields = await read_body(request, ResponsesRequest)
    model = service.check_model(fields.model)
    chat = await run_apart(request, fields.as_chat)
    plan = await run_apart(request, service.tools.plan, chat)
    generation = await start_chat(request, service, chat, plan, has_thoughts=True)
    answer = _Answer(fields, plan, generation, model)
    if fields.stream:
        return EventStream(generation, answer.events(), tell=answer.failure, end=b"")
    await generation.collect(request)
    choice = generation.choices[0]
    for chunk in choice.chunks:
        answer.items.push(chunk.parts)
    answer.finish(choice.finish_reason)
    return json_response(answer.body())


async def input_tokens(request: Request) -> Response:
    """Return the number of tokens of the input as the model would read it."""
    service: Service = request.app.state.service
    fields = await read_body(request, ResponsesRequest)
    service.check_model(fields.model)
    chat = await run_apart(request, fields.as_chat)
    counted = await count_prompt_tokens(request, service, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": counted})


class _Answer:
    """One response in progress."""

    def __init__(self, fields: ResponsesRequest, plan: ToolPlan, generation: Generation, model: str) -> None:
        self._fields, self._generation, self._model = fields, generation, model
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created_at = int(time.time())
        self._status: Any = "in_progress"
        self._num_events = 0
        self._allows_several = plan.guide.allows_several
        custom = frozenset(tool.name for tool in fields.tools if isinstance(tool, CustomTool))
        self.items = _OutputItems(plan, custom)

    def finish(self, reason: str) -> Events:
        """End the output; return the last events but one."""
        self._status = "incomplete" if reason == "length" else "completed"
        return self.items.finish(self._status)

    def body(self, **changes: Any) -> dict[str, Any]:
        """Return the response as it is now, with ``changes``."""
        fields, form = self._fields, self._fields.text.format
        is_over = self._status != "in_progress"
        return {
            **_SAME_IN_ALL,
            **fields.model_dump(include=_ECHOED),
            "parallel_tool_calls": self._allows_several,
            "id": self._id,
            "created_at": self._created_at,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self._model,
            "output": self.items.items if is_over else [],
            "reasoning": {"effort": fields.reasoning.effort, "summary": None},
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tools": [_echoed(tool) for tool in fields.tools],
            "usage": self._usage() if is_over else None,
            "user": fields.user or None,
            **(self._generation.metrics() if is_over else {}),
            **changes,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as typed events; what arrives together is sent together."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self.body()})
        async with contextlib.aclosing(self._generation.events()) as pieces:
            async for _, chunk in pieces:
                events = self.items.push(chunk.parts)
                if chunk.finish_reason is not None:
                    events += self.finish(chunk.finish_reason)
                if events:
                    yield b"".join(map(self._event, events))
        yield self._event({"type": f"response.{self._status}", "response": self.body()})

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        self._status = "failed"
        body = self.body(error={"code": "server_error", "message": str(error)})
        return self._event({"type": "response.failed", "response": body})

    def _event(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {content['type']}\n".encode() + event(numbered)

    def _usage(self) -> dict[str, Any]:
        counted = self._generation.usage()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": counted["total_tokens"],
        }


def _echoed(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return tool.model_dump(exclude_none=True)
    return {**tool.model_dump(), "strict": bool(tool.strict)}


class _OutputItems:
    """Turns an answer's pieces into items (reasoning, messages, calls), and reports their growth."""

    def __init__(self, plan: ToolPlan, custom: frozenset[str]) -> None:
        """Begin with none.

        Args:
            custom: names of custom tools, whose calls have a text as their input.
        """
        self._plan, self._custom = plan, custom
        self._input = InputText()  # of the last call, if it is one of a custom tool
        self.items: list[dict[str, Any]] = []
        self._is_open = False  # the last item may still grow

    def finish(self, status: Any) -> Events:
        """End the last item and return its events. An answer without any text is an empty message."""
        return [*([] if self.items else self._begin_message()), *self._end(status)]

    def push(self, pieces: Iterable[Piece]) -> Events:
        """Add pieces and return their events."""
        events: Events = []
        for piece in pieces:
            match piece:
                case Content(text):
                    if not self._is_open or self.items[-1]["type"] != "message":
                        events += self._end("completed") + self._begin_message()
                    self.items[-1]["content"][0]["text"] += text
                    events.append(self._part_event("output_text.delta", delta=text, logprobs=[]))
                case Thoughts(text):
                    if not self._is_open or self.items[-1]["type"] != "reasoning":
                        events += self._end("completed")
                        events.append(self._begin("rs", "reasoning", {"summary": [], "content": []}))
                        self.items[-1]["content"].append({"type": "reasoning_text", "text": ""})
                    self.items[-1]["content"][0]["text"] += text
                    events.append(self._part_event("reasoning_text.delta", delta=text))
                case CallBegun(_, name):
                    events += self._end("completed")
                    events.append(self._begin_call(name))
                case CallArguments(_, text):
                    events += self._add_arguments(text)
        return events

    def _begin_call(self, name: str) -> dict[str, Any]:
        call = {"call_id": self._plan.new_call_id(), "name": name}
        if name not in self._custom:
            return self._begin("fc", "function_call", {**call, "arguments": ""})
        self._input = InputText()
        return self._begin("ctc", "custom_tool_call", {**call, "input": ""})

    def _add_arguments(self, text: str) -> Events:
        item = self.items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            return [self._part_event("function_call_arguments.delta", delta=text)]
        return self._add_input(self._input.push(text))

    def _add_input(self, text: str) -> Events:
        self.items[-1]["input"] += text
        return [self._part_event("custom_tool_call_input.delta", delta=text)] if text else []

    def _begin_message(self) -> Events:
        added = self._begin("msg", "message", {"role": "assistant", "content": []})
        self.items[-1]["content"].append(_no_text())
        return [added, self._part_event("content_part.added", part=_no_text())]

    def _begin(self, prefix: str, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        item_id = f"{prefix}_{secrets.token_hex(12)}"
        self.items.append({"id": item_id, "type": kind, "status": "in_progress", **item})
        self._is_open = True
        return self._item_event("added")

    def _end(self, status: Any) -> Events:
        if not self._is_open:
            return []
        item, self._is_open = self.items[-1], False
        if item["type"] == "custom_tool_call":
            rest = self._add_input(self._input.finish())
            item["status"] = status
            return [
                *rest,
                self._part_event("custom_tool_call_input.done", input=item["input"]),
                self._item_event("done"),
            ]
        item["status"] = status
        if item["type"] == "function_call":
            done = self._part_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            return [done, self._item_event("done")]
        part = item["content"][0]
        if item["type"] == "reasoning":
            return [self._part_event("reasoning_text.done", text=part["text"]), self._item_event("done")]
        text = self._part_event("output_text.done", text=part["text"], logprobs=[])
        return [text, self._part_event("content_part.done", part=part), self._item_event("done")]

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if not item["type"].endswith("_call"):
            place["content_index"] = 0
        return {"type": f"response.{kind}", **place, **fields}

    def _item_event(self, kind: str) -> dict[str, Any]:
        item = copy.deepcopy(self.items[-1])  # a copy: it may grow before the event is written
        return {"type": f"response.output_item.{kind}", "output_index": len(self.items) - 1, "item": item}


def _no_text() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
