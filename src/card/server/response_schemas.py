"""Bodies of `POST /v1/responses`, and their conversion to conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from card.server.bodies import fitted
from card.server.custom_tools import CustomTool
from card.server.response_items import (
    OF_OTHER_SERVERS,
    CustomCallItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    InputMessage,
    LocalShellCallItem,
    ReasoningItem,
    content_of,
    joined,
    kind_of,
    or_text,
)
from card.server.sampling_fields import names_at
from card.server.schemas import MAX_MESSAGES, ChatRequest, CommonFields, Effort, TemplateKwargs
from card.server.strict import Ignored, NotDone, Strict, by_kind, member, takes
from card.server.tool_schemas import MAX_TOOLS, FunctionDefinition

_AS_IN_CHAT = set(names_at("responses")) | {
    "model",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "speculation",
    "include_metrics",
    "thinking_budget",
}


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]

    def as_function(self) -> dict[str, Any]:
        """Return the function as chat completions have it."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


OfferedTool = Annotated[
    Annotated[FunctionTool, member("function")] | Annotated[CustomTool, member("custom")],
    by_kind(kind_of, "tool_type", "only type function or custom is supported"),
]


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
    """The function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str


def _without(values: list[Any], left_out: Sequence[bool], field: str, ignored: Ignored) -> list[Any]:
    """Return values without some, whose types are noted as left aside."""
    for value, is_left_out in zip(values, left_out, strict=True):
        if is_left_out:
            ignored.note(f"{field}.{value['type']}")
    return [value for value, is_left_out in zip(values, left_out, strict=True) if not is_left_out]


class ResponsesRequest(CommonFields):
    """Body of `POST /v1/responses`."""

    spelling: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prompt", "messages"), "input"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        **dict.fromkeys(("grammar", "response_format"), "text.format"),
    }

    input: list[InputItem] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra=or_text)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextOptions = Field(default_factory=TextOptions)
    tools: list[OfferedTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice,
        takes('"none", "auto", "required" or {"type": "function", "name": ...}'),
    ] = "auto"
    parallel_tool_calls: bool | None = None
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
    def _own_tools_alone(cls, value: object, info: ValidationInfo) -> object:
        """Leave out tools that run on somebody else's server, as unknown fields are."""
        if not (isinstance(value, list) and isinstance(info.context, Ignored)):
            return value
        kinds = [one.get("type") if isinstance(one, dict) else None for one in value]
        left_out = [isinstance(kind, str) and kind not in ("function", "custom") for kind in kinds]
        return _without(value, left_out, "tools", info.context)

    @field_validator("input", mode="before")
    @classmethod
    def _one_text_is_a_message(cls, value: object) -> object:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("input", mode="before")
    @classmethod
    def _own_items_alone(cls, value: object, info: ValidationInfo) -> object:
        """Leave out what tools on somebody else's server did."""
        if not (isinstance(value, list) and isinstance(info.context, Ignored)):
            return value
        left_out = [isinstance(one, dict) and str(one.get("type")) in OF_OTHER_SERVERS for one in value]
        return _without(value, left_out, "input", info.context)

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
        content["tools"] = [{"type": "function", "function": tool.as_function()} for tool in self.tools]
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
                    messages.append({"role": item.role, "content": content_of(item.content)})
                case FunctionOutputItem():
                    result = {"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)}
                    messages.append(result)
                case FunctionCallItem() | CustomCallItem() | LocalShellCallItem():
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": ""})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    messages[-1].setdefault("tool_calls", []).append(call)
            if thoughts and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thoughts
            thoughts = ""
        return messages
