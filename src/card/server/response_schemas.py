"""Bodies of `POST /v1/responses`, and their conversion to conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, WithJsonSchema, field_validator, model_validator

from card.server.bodies import fitted
from card.server.sampling_fields import names_at
from card.server.schemas import MAX_MESSAGES, ChatRequest, CommonFields, Effort, TemplateKwargs
from card.server.strict import Ignored, NotDone, Strict, takes
from card.server.tool_schemas import ARGUMENTS_SCHEMA, MAX_TOOLS, FunctionDefinition

_AS_IN_CHAT = set(names_at("responses")) | {
    "model",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "speculation",
    "include_metrics",
    "thinking_budget",
}


def _refuse_other_types(kinds: tuple[str, ...]) -> Any:
    """Return a validator that refuses other types first: their fields would give misleading errors."""

    def check(value: object) -> object:
        if isinstance(value, dict) and value.get("type") not in kinds:
            raise ValueError(f"only type {' or '.join(kinds)} is supported, got {str(value.get('type'))[:40]!r}")
        return value

    return check


def _kind(item: object) -> str:
    kind = item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", "")
    return str(kind)


class TextPart(Strict):
    """A piece of text in a message or in a function's result."""

    _check_type = model_validator(mode="before")(_refuse_other_types(("input_text", "output_text", "text")))

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class RefusalPart(Strict):
    """A model's refusal."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal, as text of the assistant."""
        return self.refusal


class ImagePart(Strict):
    """An image in a message of the user."""

    type: Literal["input_image"]
    image_url: str  # a data URL, as in chat completions
    detail: Literal["auto", "low", "high", "original"] = "auto"  # ignored here
    file_id: Annotated[str | None, WithJsonSchema({"type": "null"})] = None

    @field_validator("file_id")
    @classmethod
    def _no_file_is_stored(cls, value: str | None) -> None:
        if value is not None:
            raise ValueError("this server stores no files; send the image as a data URL")


def _part_kind(part: object) -> str:
    kind = _kind(part)
    return "text" if kind in ("input_text", "output_text") else kind


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[ImagePart, Tag("input_image")],
    Discriminator(
        _part_kind,
        custom_error_type="part_type",
        custom_error_message="parts must be of type input_text, output_text, text, refusal or input_image",
    ),
]


def _joined(parts: Sequence[TextPart | RefusalPart]) -> str:
    return "\n".join(part.text for part in parts)


def _content(parts: Sequence[TextPart | RefusalPart | ImagePart]) -> str | list[dict[str, Any]]:
    """Return these parts in the shape of a chat completion."""
    texts = [part for part in parts if not isinstance(part, ImagePart)]
    if len(texts) == len(parts):
        return _joined(texts)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _or_text(schema: dict[str, Any]) -> None:
    """Let a field's schema accept a string."""
    listed = {name: schema.pop(name) for name in ("type", "items", "minItems", "maxItems") if name in schema}
    schema["anyOf"] = [{"type": "string"}, listed]


class InputMessage(Strict):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: list[ContentPart] = Field(fail_fast=True, json_schema_extra=_or_text)
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    phase: Literal["commentary", "final_answer"] | None = None

    _take_text = field_validator("content", mode="before")(_as_parts)


class FunctionCallItem(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, WithJsonSchema(ARGUMENTS_SCHEMA)]
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"


class FunctionOutputItem(Strict):
    """Result of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: list[TextPart] = Field(fail_fast=True, json_schema_extra=_or_text)
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    _take_text = field_validator("output", mode="before")(_as_parts)


class ReasoningItem(Strict):
    """Thoughts of the model before its answer or its calls; the chat template decides whether it reads them."""

    type: Literal["reasoning"]
    id: str = ""
    summary: list[Any] = Field(default_factory=list)
    content: list[Any] = Field(default_factory=list)
    encrypted_content: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    @property
    def text(self) -> str:
        """The thoughts, as far as they are there as text."""
        parts = [part.get("text") for part in self.content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="items must be of type message, reasoning, function_call or function_call_output",
    ),
]


class FunctionTool(FunctionDefinition):
    """A function that the model may call; other tools are not supported."""

    _check_type = model_validator(mode="before")(_refuse_other_types(("function",)))

    type: Literal["function"]


class TextFormat(Strict):
    """Form that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema belongs to the type json_schema, and that type needs it")
        return self


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # ignored


class Reasoning(Strict):
    """Effort of thinking before an answer, passed to the chat template; most templates ignore it."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None  # ignored


class ResponseStreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: NotDone = False


class NamedChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(CommonFields):
    """Body of `POST /v1/responses`."""

    spelling: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prompt", "messages"), "input"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        **dict.fromkeys(("grammar", "response_format"), "text.format"),
    }

    input: list[InputItem] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra=_or_text)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextOptions = Field(default_factory=TextOptions)
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice,
        takes('"none", "auto", "required" or {"type": "function", "name": ...}'),
    ] = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Field(default_factory=Reasoning)
    stream_options: ResponseStreamOptions | None = None
    include: list[str] = Field(default_factory=list, max_length=32, description="ignored")
    truncation: Literal["auto", "disabled"] = Field("disabled", description="ignored: nothing is cut off")
    background: NotDone = False
    previous_response_id: Annotated[str | None, WithJsonSchema({"type": "null"})] = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    thinking_budget: int | None = Field(None, ge=0, lt=2**31, description="most tokens of thoughts")

    @field_validator("tools", mode="before")
    @classmethod
    def _functions_alone(cls, value: object, info: ValidationInfo) -> object:
        """Leave out tools that run on somebody else's server, as unknown fields are."""
        if not (isinstance(value, list) and isinstance(info.context, Ignored)):
            return value
        kinds = [one.get("type") if isinstance(one, dict) else None for one in value]
        for kind in kinds:
            if isinstance(kind, str) and kind != "function":
                info.context.note(f"tools.{kind}")
        return [one for one, kind in zip(value, kinds, strict=True) if kind == "function" or not isinstance(kind, str)]

    @field_validator("input", mode="before")
    @classmethod
    def _one_text_is_a_message(cls, value: object) -> object:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("previous_response_id")
    @classmethod
    def _nothing_is_stored(cls, value: str | None) -> None:
        if value is not None:
            raise ValueError("this server stores no answers; send the whole conversation as input")

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat completion. Raises: ApiError 400."""
        content = self.model_dump(include=_AS_IN_CHAT)
        content["max_completion_tokens"] = self.max_output_tokens
        content["reasoning_effort"] = self.reasoning.effort
        content["messages"] = self._messages()
        content["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        content["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, NamedChoice):
            content["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        form = self.text.format
        if form is not None and form.type != "text":
            content["response_format"] = {"type": form.type}
            if form.schema_ is not None:
                schema = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
                content["response_format"]["json_schema"] = schema
        return fitted(content, ChatRequest)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the items as messages; calls belong to the assistant's turn before them."""
        messages: list[dict[str, Any]] = []
        thoughts = ""
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            match item:
                case ReasoningItem():
                    thoughts += item.text
                    continue
                case InputMessage():
                    messages.append({"role": item.role, "content": _content(item.content)})
                case FunctionOutputItem():
                    result = {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
                    messages.append(result)
                case FunctionCallItem():
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": ""})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    messages[-1].setdefault("tool_calls", []).append(call)
            if thoughts and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thoughts
            thoughts = ""
        return messages
