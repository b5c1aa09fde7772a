"""What `/openapi.json` says: the bodies that the endpoints read by themselves, the answers they give, the errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from card.server.auth import is_guarded
from card.server.response_schemas import ResponsesRequest
from card.server.schemas import TOKEN_ID, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class HealthAnswer(_Answer):
    """It lives, or takes requests."""

    status: Literal["ok"]


class UnavailableAnswer(ErrorAnswer):
    """It does not, and why."""

    status: Literal["unavailable"]


class ModelAnswer(_Answer):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelsAnswer(_Answer):
    """All names."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(_Answer):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(_Answer):
    """The text of token ids."""

    prompt: str


class LoadAnswer(_Answer):
    """How much there is to do."""

    server_load: int
    running: int
    waiting: int
    max_num_seqs: int
    max_num_queued_reqs: int


class VersionAnswer(_Answer):
    """What is running."""

    version: str
    model: str
    draft_model: str | None
    method: str
    exact: bool
    target_cost: str | None


class PromptTokensDetails(_Answer):
    """Tokens of prompts whose work was done already."""

    cached_tokens: int


class Usage(_Answer):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Alternative(_Answer):
    """A candidate that was verified beside a token."""

    token_id: int
    text: str
    path_logprob: float
    writer: str


class Token(_Answer):
    """Where a token came from (`shows_tree`)."""

    token_id: int
    text: str
    origin: str
    alternatives: list[Alternative]


class TopLogprob(_Answer):
    """A token that might have stood in a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat answer, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]


class CompletionLogprobs(_Answer):
    """Log-probabilities of a completion, with those of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(_Answer):
    """The function of a call, and the JSON of what it is given."""

    name: str
    arguments: str


class Call(_Answer):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(_Answer):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] = []


class _Choice(_Answer):
    index: int
    tokens: list[Token] = []


class ChatChoice(_Choice):
    """One chat answer."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(_Choice):
    """One completion."""

    finish_reason: Literal["stop", "length"]
    text: str
    logprobs: CompletionLogprobs | None


class _Written(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: dict[str, Any] | None = None


class ChatAnswer(_Written):
    """Answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(_Written):
    """Continuations of prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OutputText(_Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class OutputMessage(_Answer):
    """A message of a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputCall(_Answer):
    """A call of a response."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class ResponseUsage(_Answer):
    """Numbers of tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponsesAnswer(_Answer):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[Literal["effort", "summary"], str | None]
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float | None
    text: dict[Literal["format"], dict[str, Any]]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    metadata: dict[str, str]
    metrics: dict[str, Any] | None = None


_ANSWERS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/responses": ResponsesAnswer,
    "/tokenize": TokenizeAnswer,
    "/detokenize": DetokenizeAnswer,
    "/v1/models": ModelsAnswer,
    "/v1/models/{model_name:path}": ModelAnswer,
    "/health": HealthAnswer,
    "/health/ready": HealthAnswer,
    "/version": VersionAnswer,
    "/load": LoadAnswer,
}
_ERRORS = {
    400: "The request cannot be done as it is; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The body did not come.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; see Retry-After.",
    500: "The model failed, or the server did.",
    503: "The server is shutting down, the engine is down, or the request took too long; see Retry-After.",
}
_OF_BODIES = (400, 401, 404, 408, 413, 415, 500, 503)
_OF_PATHS = {
    "/v1/models": (401,),
    "/v1/models/{model_name:path}": (401, 404),
    "/health": (503,),
    "/health/ready": (503,),
    "/load": (503,),
    "/version": (),
    "/metrics": (),
}
_WRITING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes on at most."""

    model_names: tuple[str, ...]
    vocab_size: int
    num_choices: int  # of one request
    num_new_tokens: int  # of one text


def answers(path: str) -> dict[int | str, dict[str, Any]]:
    """Return what a path answers, by status, as FastAPI's `responses`."""
    told: dict[int | str, dict[str, Any]] = {200: {"description": "Done."}}
    if path in _ANSWERS:
        told[200]["model"] = _ANSWERS[path]
    if path in _WRITING:
        told[200]["content"] = {"text/event-stream": {}}
    elif path == "/metrics":
        told[200]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    statuses = _OF_BODIES if path in BODIES else _OF_PATHS[path]
    for status in (*statuses, *((429,) if path in _WRITING else ())):
        model = UnavailableAnswer if path.startswith("/health") else ErrorAnswer
        told[status] = {"description": _ERRORS[status], "model": model}
        if status in (429, 503):
            told[status]["headers"] = _RETRY_AFTER
    return told


def operation(path: str, *, has_keys: bool) -> dict[str, Any]:
    """Return what else is to be said of a path: its body, the part of the path that varies, whether it needs a key."""
    told: dict[str, Any] = {}
    model = BODIES.get(path)
    if model is not None:
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{model_name" in path:
        name = {"type": "string", "minLength": 1}
        told["parameters"] = [{"name": "model_name", "in": "path", "required": True, "schema": name}]
    if has_keys and is_guarded(path):
        told["security"] = [{"key": []}]
    return told


def describe(app: FastAPI, limits: Limits, *, has_keys: bool) -> None:
    """Put the schemas of the bodies, and how a key is sent, into the application's `/openapi.json`."""
    _, found = models_json_schema(
        [(model, "validation") for model in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    bodies = found["$defs"]
    for model in BODIES.values():
        _limit(bodies[model.__name__], limits)
    for body in bodies.values():
        _allow_null(body)
    bodies[TOKEN_ID] = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(bodies)
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _limit(body: dict[str, Any], limits: Limits) -> None:
    """Say what this server takes on, which may be less than the fields allow."""
    fields = body["properties"]
    fields["model"] = {"enum": [*limits.model_names, ""], "default": ""}
    for name, most in (
        ("n", limits.num_choices),
        ("max_tokens", limits.num_new_tokens),
        ("max_completion_tokens", limits.num_new_tokens),
        ("max_output_tokens", limits.num_new_tokens),
    ):
        field = fields.get(name, {})
        for kind in field.get("anyOf", [field]):
            if kind.get("type") == "integer":
                kind.pop("exclusiveMaximum", None)
                kind["maximum"] = most


def _allow_null(body: dict[str, Any]) -> None:
    """Say that a field which may be left out may be null as well, which counts as the same, whatever its name."""
    body["additionalProperties"] = {"type": "null"}
    for name, field in body["properties"].items():
        if name not in body.get("required", ()):
            outer = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            kinds = field["anyOf"] if "anyOf" in field else [dict(field)]
            is_nullable = {"type": "null"} in kinds
            field.clear()
            field.update(outer, anyOf=kinds if is_nullable else [*kinds, {"type": "null"}])
