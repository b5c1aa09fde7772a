"""What the server answers: the models that answers are built of, which `/openapi.json` shows too."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from card.server.errors import ApiError

_LEFT_OUT = object()


def left_out() -> Any:
    """Declare a field that an answer does not have unless it is given a value, which may be null."""
    return Field(default_factory=lambda: _LEFT_OUT, exclude_if=lambda value: value is _LEFT_OUT)


class Answer(BaseModel):
    """A JSON object of an answer."""

    model_config = ConfigDict(extra="forbid")


_encode = msgspec.json.Encoder(enc_hook=BaseModel.model_dump).encode


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer in JSON; ``content`` may hold models."""
    return Response(_encode(content), status, headers, "application/json")


def event(content: dict[str, Any]) -> bytes:
    """Return one server-sent event; ``content`` may hold models."""
    return b"data: " + _encode(content) + b"\n\n"


class ErrorDetail(Answer):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: ApiError) -> ErrorDetail:
        """Return what an answer says of ``error``."""
        return cls(message=str(error), type=error.kind, param=error.param, code=error.code)


class ErrorAnswer(Answer):
    """An error in OpenAI's shape."""

    error: ErrorDetail


def error_response(error: ApiError, **headers: str) -> Response:
    """Return the answer that is an error, with these headers besides its own."""
    return json_response(ErrorAnswer(error=ErrorDetail.of(error)), error.status, error.headers() | headers)


class HealthAnswer(Answer):
    """The server lives, or takes requests."""

    status: Literal["ok"] = "ok"


class UnavailableAnswer(ErrorAnswer):
    """The server does not live, or takes no requests, and why."""

    status: Literal["unavailable"] = "unavailable"


class ModelAnswer(Answer):
    """A name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "card"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelsAnswer(Answer):
    """All names under which the model is served."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class TokenizeAnswer(Answer):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """The text of token ids."""

    prompt: str


class LoadAnswer(Answer):
    """How much there is to do."""

    server_load: int
    running: int
    waiting: int
    max_num_seqs: int
    max_num_queued_reqs: int


class VersionAnswer(Answer):
    """What is running."""

    version: str
    model: str
    draft_model: str | None
    method: str
    exact: bool
    target_cost: str | None


class PromptTokensDetails(Answer):
    """Tokens of prompts whose work was done already."""

    cached_tokens: int


class Usage(Answer):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Alternative(Answer):
    """A candidate that was verified beside a token."""

    token_id: int
    text: str
    path_logprob: float
    writer: str


class Token(Answer):
    """Where a token came from (`shows_tree`)."""

    token_id: int
    text: str
    origin: str
    alternatives: list[Alternative]


class TopLogprob(Answer):
    """A token that might have stood in a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat answer, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion, with those of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(Answer):
    """The function of a call, and the JSON of what it is given."""

    name: str
    arguments: str


class Call(Answer):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(Answer):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[Call] = left_out()


class ChatChoice(Answer):
    """One chat answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    tokens: list[Token] = left_out()


class CompletionChoice(Answer):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    tokens: list[Token] = left_out()


class _Written(Answer):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage
    metrics: dict[str, Any] | None = left_out()


class ChatAnswer(_Written):
    """Answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(_Written):
    """Continuations of prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[None] = []
    logprobs: list[None] = []


class OutputMessage(Answer):
    """A message of a response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    content: list[OutputText]


class OutputCall(Answer):
    """A call of a response."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class ResponseUsage(Answer):
    """Numbers of tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int] = {"reasoning_tokens": 0}
    total_tokens: int


class ResponsesAnswer(Answer):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[Literal["code", "message"], str] | None = None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[Literal["effort", "summary"], str | None]
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float | None
    text: dict[Literal["format"], dict[str, Any]]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    metrics: dict[str, Any] | None = left_out()
