"""Items of a conversation in bodies of `POST /v1/responses`: messages, thoughts, calls and their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from card.server.custom_tools import as_arguments
from card.server.strict import Strict, by_kind, member
from card.server.tool_schemas import ARGUMENTS_SCHEMA


def _refuse_other_types(kinds: tuple[str, ...]) -> Any:
    """Return a validator that refuses other types first: their fields would give misleading errors."""

    def check(value: object) -> object:
        if isinstance(value, dict) and value.get("type") not in kinds:
            raise ValueError(f"only type {' or '.join(kinds)} is supported, got {str(value.get('type'))[:40]!r}")
        return value

    return check


def kind_of(item: object) -> str:
    """Return the type of an item, a part or a tool; an item without one is a message."""
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
    kind = kind_of(part)
    return "text" if kind in ("input_text", "output_text") else kind


ContentPart = Annotated[
    Annotated[TextPart, member("text")]
    | Annotated[RefusalPart, member("refusal")]
    | Annotated[ImagePart, member("input_image")],
    by_kind(_part_kind, "part_type", "parts must be of type input_text, output_text, text, refusal or input_image"),
]


def joined(parts: Sequence[TextPart | RefusalPart]) -> str:
    """Return the text of parts, a line between two of them."""
    return "\n".join(part.text for part in parts)


def content_of(parts: Sequence[TextPart | RefusalPart | ImagePart]) -> str | list[dict[str, Any]]:
    """Return these parts in the shape of a chat completion."""
    texts = [part for part in parts if not isinstance(part, ImagePart)]
    if len(texts) == len(parts):
        return joined(texts)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def or_text(schema: dict[str, Any]) -> None:
    """Let a field's schema accept a string."""
    listed = {name: schema.pop(name) for name in ("type", "items", "minItems", "maxItems") if name in schema}
    schema["anyOf"] = [{"type": "string"}, listed]


class InputMessage(Strict):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: list[ContentPart] = Field(fail_fast=True, json_schema_extra=or_text)
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


class CustomCallItem(Strict):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    @property
    def arguments(self) -> str:
        """The input, as the arguments of a function."""
        return as_arguments(self.input)


class LocalShellCallItem(Strict):
    """A call of the shell that models of OpenAI's know without being told of it."""

    type: Literal["local_shell_call"]
    call_id: str
    action: dict[str, Any]
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    name: ClassVar[str] = "local_shell"

    @property
    def arguments(self) -> str:
        """The action of the shell, as the arguments of a function."""
        given = {name: value for name, value in self.action.items() if name != "type" and value is not None}
        return json.dumps(given, ensure_ascii=False)


class FunctionOutputItem(Strict):
    """Result of a function or of a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: list[TextPart] = Field(fail_fast=True, json_schema_extra=or_text)
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


def _item_kind(item: object) -> str:
    kind = kind_of(item)
    return "function_call_output" if kind == "custom_tool_call_output" else kind


# Items of history that tell of what another server's tools did. Their results are in the answer behind them.
OF_OTHER_SERVERS = frozenset({"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"})

InputItem = Annotated[
    Annotated[InputMessage, member("message")]
    | Annotated[ReasoningItem, member("reasoning")]
    | Annotated[FunctionCallItem, member("function_call")]
    | Annotated[CustomCallItem, member("custom_tool_call")]
    | Annotated[LocalShellCallItem, member("local_shell_call")]
    | Annotated[FunctionOutputItem, member("function_call_output")],
    by_kind(
        _item_kind,
        "item_type",
        "items must be of type message, reasoning, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output or local_shell_call",
    ),
]
