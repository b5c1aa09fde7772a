"""Functions in requests: the offered ones, the one to call, and the calls of earlier turns."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema, field_validator

from card.server.shape import shape_of
from card.server.strict import Strict, by_type, takes

NAME_PATTERN = "^[a-zA-Z0-9_.-]{1,128}$"
MAX_TOOLS = 1024

_PARAMETERS_SCHEMA = {"type": "object", "properties": {"type": {"const": "object"}}}
_HEX = "[0-9a-fA-F]"
# Escapes in JSON strings: those that stay as they are, or one of half a character, which models write when they are cut
# off and which no text can hold.
_ESCAPES = re.compile(rf"(\\[^u]|\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})|\\u[dD][89a-fA-F]{_HEX}{{2}}")
ARGUMENTS_SCHEMA = {"type": "string", "description": "JSON of an object; the model gets anything else as it is"}


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, WithJsonSchema(_PARAMETERS_SCHEMA)] = None
    strict: bool | None = Field(
        None,
        description="true: calls keep to the schema, even if the model may choose not to call; "
        "false: parts that no grammar can enforce are left to the model",
    )

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise ValueError('must be a JSON schema of type "object"')
        return value

    def as_template_has_it(self) -> dict[str, Any]:
        """Return the function in the shape that chat templates read."""
        function = self.model_dump(include={"name", "description"}, exclude_none=True)
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class Tool(Strict):
    """A function that is offered."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class NamedCustom(Strict):
    """The custom tool that must be called."""

    type: Literal["custom"]
    custom: FunctionName

    @property
    def function(self) -> FunctionName:
        """The function that stands for the tool."""
        return self.custom


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedTool | NamedCustom, by_type(NamedTool, NamedCustom)],
    takes('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


class CalledFunction(Strict):
    """The function of an earlier call, and its arguments."""

    name: str
    arguments: Annotated[str, WithJsonSchema(ARGUMENTS_SCHEMA)]
    parsed_arguments: Any = Field(None, description="left over from a client that has parsed the arguments")
    provider_specific_fields: dict[str, Any] = Field(default_factory=dict)


def decoded_arguments(arguments: str) -> dict[str, Any] | str:
    """Return the arguments of a call; the text itself if it is not a JSON object, as models may write or be cut off.

    An empty text counts as no arguments; half a character becomes U+FFFD.
    """
    data = _ESCAPES.sub(lambda found: found[1] or r"\ufffd", arguments.strip() or "{}").encode()
    if shape_of(data).excess():
        return arguments
    try:
        decoded = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


class ToolCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # left over from a client that has joined a stream
    provider_specific_fields: dict[str, Any] = Field(default_factory=dict)

    def as_template_has_it(self) -> dict[str, Any]:
        """Return the call in the shape that chat templates read."""
        function = {"name": self.function.name, "arguments": decoded_arguments(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}
