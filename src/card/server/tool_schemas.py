"""What clients may send of functions: those offered, which one to call, and the calls of earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema, field_validator

from card.server.strict import Strict

NAME_PATTERN = "^[a-zA-Z0-9_.-]{1,64}$"
MAX_TOOLS = 128

_NAMED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA]}
_PARAMETERS_SCHEMA = {"type": "object", "properties": {"type": {"const": "object"}}}
ARGUMENTS_SCHEMA = {"type": "string", "description": "JSON of an object"}


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, WithJsonSchema(_PARAMETERS_SCHEMA)] = None
    strict: bool | None = Field(
        None, description="calls keep to the schema, also where the model is free to call or not"
    )

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise ValueError('must be a JSON schema of type "object"')
        return value

    def as_template_has_it(self) -> dict[str, Any]:
        """Return the function in the shape that chat templates read."""
        told: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            told["description"] = self.description
        told["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": told}


class Tool(Strict):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """The function that must be called."""

    name: str


ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)]
"""`none`, `auto`, `required` or a `NamedFunction`; see `as_tool_choice`."""


def as_tool_choice(value: object) -> str | NamedFunction:
    """Return a choice in one of the shapes that OpenAI allows. Raises: ValueError for another one."""
    if value in ("none", "auto", "required"):
        return str(value)
    if isinstance(value, dict) and set(value) == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return NamedFunction(name=function["name"])
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


class CalledFunction(Strict):
    """The function of an earlier call, and what it was given."""

    name: str
    arguments: Annotated[str, WithJsonSchema(ARGUMENTS_SCHEMA)]

    @field_validator("arguments")
    @classmethod
    def _hold_an_object(cls, value: str) -> str:
        decoded_arguments(value)
        return value


def decoded_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; an empty text counts as none. Raises: ValueError if they are no JSON object."""
    try:
        decoded = msgspec.json.decode(arguments.strip() or "{}")
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise ValueError("must be JSON of an object")
    return decoded


class ToolCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # left over where a client put a stream together
