"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from card.server.answers import json_response
from card.server.bodies import read_body, run_apart
from card.server.chat import start_chat
from card.server.completions import completion_job
from card.server.generation import Generation, generate
from card.server.ollama.answers import Answer, LineStream, now
from card.server.ollama.schemas import OllamaChatRequest, OllamaFields, OllamaGenerateRequest
from card.server.schemas import ChatRequest, CompletionRequest
from card.server.service import Service
from card.server.tools.support import ToolPlan

_Kind = Literal["chat", "generate"]


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    fields = await read_body(request, OllamaChatRequest)
    model = service.check_model(fields.model)
    if not fields.messages:
        return _nothing_asked(model, "chat", fields)
    return await _converse(request, fields, await run_apart(request, fields.as_chat), "chat", model)


async def generate_text(request: Request) -> Response:
    """Answer a prompt, which the chat template surrounds unless it is raw, begins a gap, or the model has none."""
    service: Service = request.app.state.service
    fields = await read_body(request, OllamaGenerateRequest)
    model = service.check_model(fields.model)
    if not (fields.prompt or fields.suffix or fields.images):
        return _nothing_asked(model, "generate", fields)
    is_bare = not (service.llm.host.answers.template or fields.system or fields.images)
    if not (fields.raw or fields.suffix or is_bare):
        return await _converse(request, fields, await run_apart(request, fields.as_chat), "generate", model)
    generation = await _start_completion(request, service, fields.as_completion())
    answer = Answer(service, generation, kind="generate", model=model, has_logprobs=fields.logprobs)
    return await _answered(request, fields, generation, answer)


def _nothing_asked(model: str, kind: _Kind, fields: OllamaFields) -> Response:
    """Return what Ollama says when it has loaded a model, or let go of it; the model here stays."""
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if kind == "chat" else {"response": ""}
    is_unload = fields.keep_alive is not None and str(fields.keep_alive) in ("0", "0s", "0m")
    reason = "unload" if is_unload else "load"
    return json_response({"model": model, "created_at": now(), **empty, "done": True, "done_reason": reason})


async def _converse(request: Request, fields: OllamaFields, asked: ChatRequest, kind: _Kind, model: str) -> Response:
    service: Service = request.app.state.service
    plan: ToolPlan = await run_apart(request, service.tools.plan, asked)
    if plan.grammar_param == "response_format":
        plan = replace(plan, grammar_param="format")
    generation = await start_chat(request, service, asked, plan)
    answer = Answer(
        service, generation, kind=kind, model=model, new_call_id=plan.new_call_id, has_logprobs=fields.logprobs
    )
    return await _answered(request, fields, generation, answer)


async def _start_completion(request: Request, service: Service, asked: CompletionRequest) -> Generation:
    job = await completion_job(request, service, asked, asked.prompts[0], guide="format")
    generation = generate(service, request.state.arrival, asked, [job])
    request.state.generation = generation
    return generation


async def _answered(request: Request, fields: OllamaFields, generation: Generation, answer: Answer) -> Response:
    if fields.stream:
        return LineStream(generation, answer.lines())
    await generation.collect(request)
    request.state.is_large = generation.is_large(fields.top_logprobs if fields.logprobs else None)
    return json_response(await run_apart(request, answer.body))
