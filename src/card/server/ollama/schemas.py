"""Bodies of Ollama's API, and their conversion to chat completions and completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, ValidationInfo, field_validator, model_validator

from card.server.bodies import fitted
from card.server.sampling_fields import names_at, same_at, with_fields
from card.server.schemas import MAX_MESSAGES, THINKING_SWITCHES, ChatRequest, CompletionRequest, StopStrings
from card.server.strict import Strict, takes
from card.server.tool_schemas import MAX_TOOLS, Tool

_MAX_IMAGES = 1024
_Images = Annotated[list[str], Field(max_length=_MAX_IMAGES, fail_fast=True, description="base64")]


if TYPE_CHECKING:
    _Sampled = Strict
else:
    _Sampled = with_fields(Strict, "ollama")


class OllamaOptions(_Sampled):
    """Options of sampling. Those of loading a model, such as num_ctx, are left aside."""

    changing: ClassVar[Mapping[str, tuple[object, ...]]] = {"mirostat": (0,), "typical_p": (1,)}

    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="negative: another one each time")
    num_predict: int | None = Field(None, ge=-2, lt=2**31, description="0 and less set no bound")
    stop: StopStrings = Field(default_factory=list)

    def as_sampling(self) -> dict[str, Any]:
        """Return the fields of a completion that say the same."""
        given = {**same_at("ollama", self.model_dump()), "stop": self.stop}
        given["seed"] = self.seed if (self.seed or 0) >= 0 else None
        given["max_tokens"] = self.num_predict if (self.num_predict or 0) > 0 else -1
        return given


class OllamaCalledFunction(Strict):
    """The function of an earlier call."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict, description="an object, or its JSON")
    index: int | None = None


class OllamaCall(Strict):
    """A call that the model made in an earlier turn."""

    function: OllamaCalledFunction
    id: str = ""
    type: Literal["function"] = "function"

    def as_chat(self, call_id: str) -> dict[str, Any]:
        """Return the call in OpenAI's form."""
        given = self.function.arguments
        arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        return {"id": call_id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class OllamaMessage(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    images: _Images = Field(default_factory=list)
    tool_calls: list[OllamaCall] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_name: str = Field("", description="of a result: the function that gave it")
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _belongs_to_its_role(self) -> OllamaMessage:
        if self.images and self.role != "user":
            raise ValueError("images belong to messages of the role user")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        return self


def _content(text: str, images: Iterable[str]) -> str | list[dict[str, Any]]:
    """Return a text and images in the form of a chat completion. Only base64 is taken: a client names no file."""
    urls = [one if one[:5].lower() == "data:" else f"data:;base64,{one}" for one in images]
    if not urls:
        return text
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*shown, *([{"type": "text", "text": text}] if text else [])]


def chat_messages(messages: Iterable[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, where a result names its call: the first open one of its function."""
    told: list[dict[str, Any]] = []
    num_calls = 0
    open_calls: list[tuple[str, str]] = []  # function and id of calls without a result
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call{num_calls + idx:05}" for idx, call in enumerate(message.tool_calls)]
            num_calls += len(ids)  # nine letters and digits, as Mistral's templates want them
            one["tool_calls"] = [call.as_chat(call_id) for call, call_id in zip(message.tool_calls, ids, strict=True)]
            open_calls = [(call.function.name, call_id) for call, call_id in zip(message.tool_calls, ids, strict=True)]
        if message.role == "tool":
            name = message.tool_name
            fitting = [call_id for function, call_id in open_calls if name in ("", function)]
            call_id = message.tool_call_id or next(iter(fitting), None)
            open_calls = [call for call in open_calls if call[1] != call_id]
            one |= {"tool_call_id": call_id, "name": name or None}
        told.append(one)
    return told


class OllamaFields(Strict):
    """The fields that both kinds of request share."""

    spelling: ClassVar[Mapping[str, str]] = {
        **{name: f"options.{name}" for name in ("seed", "stop")},
        **{name: f"options.{field}" for name, field in names_at("ollama").items()},
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "options.num_predict"),
        **dict.fromkeys(("grammar", "response_format"), "format"),
    }

    model: str = ""
    stream: bool = True
    options: OllamaOptions = Field(default_factory=lambda: OllamaOptions.model_validate({}))
    format: Annotated[Literal["", "json"] | dict[str, Any], takes('"json" or a JSON schema')] = ""
    think: (
        Annotated[bool | Literal["low", "medium", "high"], takes('true, false, "low", "medium" or "high"')] | None
    ) = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    keep_alive: Any = Field(None, description="ignored: the model stays")

    def _shared(self) -> dict[str, Any]:
        """Return the fields of a completion that say the same."""
        fields = {"model": self.model, "stream": self.stream, **self.options.as_sampling()}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):  # in this API no client can say that a part may be left to the model
            schema = {"name": "answer", "schema": self.format, "strict": False}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _conversation(self, messages: Iterable[OllamaMessage], tools: Iterable[Tool] = ()) -> ChatRequest:
        """Return the chat completion of these messages. Raises: ApiError 400."""
        fields = {**self._shared(), "messages": chat_messages(messages), "logprobs": self.logprobs}
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        if self.logprobs:
            fields["top_logprobs"] = self.top_logprobs
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = dict.fromkeys(THINKING_SWITCHES, self.think)
        return fitted(fields, ChatRequest)


class OllamaChatRequest(OllamaFields):
    """Body of `POST /api/chat`. Without messages it asks whether the model is there."""

    spelling: ClassVar[Mapping[str, str]] = {**OllamaFields.spelling, "prompt": "messages"}

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat completion. Raises: ApiError 400."""
        return self._conversation(self.messages, self.tools)


class OllamaGenerateRequest(OllamaFields):
    """Body of `POST /api/generate`. Without a prompt it asks whether the model is there."""

    changing: ClassVar[Mapping[str, tuple[object, ...]]] = {"context": ([],), "template": ("",)}
    spelling: ClassVar[Mapping[str, str]] = {**OllamaFields.spelling, "messages": "prompt"}

    prompt: str = ""
    system: str = ""
    images: _Images = Field(default_factory=list)
    raw: bool = Field(False, description="the prompt is the whole text, without a template")
    suffix: str = Field("", description="the text behind the gap that the answer fills")

    @field_validator("raw", "suffix")
    @classmethod
    def _without_a_template_a_prompt_stands_alone(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        if value and (info.data.get("system") or info.data.get("images")):
            raise ValueError("takes neither system nor images beside it; write them into the prompt")
        return value

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat completion. Raises: ApiError 400."""
        turns: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        turns.append({"role": "user", "content": self.prompt, "images": self.images})
        return self._conversation([fitted(turn, OllamaMessage) for turn in turns])

    def as_completion(self) -> CompletionRequest:
        """Return the equivalent completion of a prompt without a template. Raises: ApiError 400."""
        fields = {**self._shared(), "prompt": self.prompt, "suffix": self.suffix}
        return fitted({**fields, "logprobs": self.top_logprobs} if self.logprobs else fields, CompletionRequest)


class OllamaShowRequest(Strict):
    """Body of `POST /api/show`."""

    model: str = ""
    name: str = Field("", description="an older name of model")
    verbose: bool = Field(False, description="ignored")
