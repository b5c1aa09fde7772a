"""Custom tools, whose input is one text: a model calls them as functions with one argument."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from card.server.strict import Ignored, Strict
from card.server.tool_schemas import NAME_PATTERN, CalledFunction, FunctionDefinition, ToolCall, decoded_arguments

_INPUT = "input"  # the argument's name


class CustomFormat(Strict):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self, info: ValidationInfo) -> CustomFormat:
        if (self.type == "grammar") != (self.syntax is not None and self.definition is not None):
            raise ValueError("syntax and definition belong to the type grammar, and that type needs both")
        if self.type == "grammar":
            if not isinstance(info.context, Ignored):
                raise ValueError("this server does not hold a custom tool to its grammar; leave format out")
            info.context.note("tools.format")
        return self


class CustomDefinition(Strict):
    """A tool whose input is a text. The model is told its grammar, and not held to it."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    format: CustomFormat | None = None

    def as_function(self) -> dict[str, Any]:
        """Return the function that stands for the tool."""
        description = "The whole input of the tool, as one text."
        if self.format is not None and self.format.definition is not None:
            description += f" It must follow this {self.format.syntax} grammar:\n{self.format.definition}"
        parameters = {
            "type": "object",
            "properties": {_INPUT: {"type": "string", "description": description}},
            "required": [_INPUT],
            "additionalProperties": False,
        }
        return {"name": self.name, "description": self.description, "parameters": parameters}


class CustomTool(CustomDefinition):
    """A custom tool of a response."""

    type: Literal["custom"]


def as_arguments(text: str) -> str:
    """Return the arguments of a call whose input is a text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


# ---- in chat completions ---------------------------------------------------------------------------------------------

_GRAMMAR_SCHEMA = {
    "type": "object",
    "properties": {"syntax": {"enum": ["lark", "regex"]}, "definition": {"type": "string"}},
    "required": ["syntax", "definition"],
}
_FORMAT_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "grammar"}, "grammar": _GRAMMAR_SCHEMA},
            "required": ["type", "grammar"],
        },
        {"type": "null"},
    ]
}


def _flat(value: object) -> object:
    """Return a form as responses have it: with the grammar's fields beside its type."""
    if not (isinstance(value, dict) and isinstance(value.get("grammar"), dict)):
        return value
    return {**{name: one for name, one in value.items() if name != "grammar"}, **value["grammar"]}


class _ChatDefinition(CustomDefinition):
    format: Annotated[CustomFormat | None, BeforeValidator(_flat), WithJsonSchema(_FORMAT_SCHEMA)] = None


class OfferedCustom(Strict):
    """A custom tool of a chat completion."""

    type: Literal["custom"]
    custom: _ChatDefinition

    @cached_property
    def function(self) -> FunctionDefinition:
        """The function that stands for the tool."""
        return FunctionDefinition.model_validate(self.custom.as_function())


class CalledCustom(Strict):
    """The custom tool of an earlier call, and its input."""

    name: str
    input: str


class CustomCall(Strict):
    """A call of a custom tool that the model made in an earlier turn."""

    id: str
    type: Literal["custom"]
    custom: CalledCustom
    index: int | None = None  # left over from a client that has joined a stream

    @cached_property
    def function(self) -> CalledFunction:
        """The call, as that of a function."""
        called = {"name": self.custom.name, "arguments": as_arguments(self.custom.input)}
        return CalledFunction.model_validate(called)

    def as_template_has_it(self) -> dict[str, Any]:
        """Return the call in the shape that chat templates read."""
        return ToolCall(id=self.id, function=self.function).as_template_has_it()


# ---- texts in arguments ----------------------------------------------------------------------------------------------

_BEGINNING = re.compile(rf'\s*(?:\{{\s*"{_INPUT}"\s*:\s*)?"')
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
# An escape in a JSON string, as far as it is whole: two may stand for one character, and models write wrong ones.
_ESCAPE = (
    rf"{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u]|\\u{_HEX}{{4}})|(?!{_HIGH})\\u{_HEX}{{4}}|\\u(?={_HEX}{{0,3}}[^0-9a-fA-F])"
)
_ESCAPES = re.compile(rf"{_ESCAPE}|\\[^u]")
_WHOLE = re.compile(rf'(?:[^"\\]+|{_ESCAPES.pattern})+')
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class InputText:
    """Takes the text of a custom tool's input out of the arguments of its call, as they come."""

    def __init__(self) -> None:
        self._arguments = ""
        self._place: int | None = None  # in the arguments, behind what is read of the text; None: it has not begun

    def push(self, arguments: str) -> str:
        """Add a piece of the arguments and return the text that it adds."""
        self._arguments += arguments
        if self._place is None:
            beginning = _BEGINNING.match(self._arguments)
            self._place = beginning.end() if beginning else None
        if self._place is None or not (match := _WHOLE.match(self._arguments, self._place)):
            return ""
        self._place = match.end()
        return _ESCAPES.sub(_character, match[0])

    def finish(self) -> str:
        """Return the rest of the text: all arguments as they are, if they have another form."""
        if self._place is not None:
            return ""
        decoded = decoded_arguments(self._arguments)
        if not isinstance(decoded, dict):
            return self._arguments
        text = decoded.get(_INPUT, self._arguments if decoded else "")
        return text if isinstance(text, str) else self._arguments


def _character(escape: re.Match[str]) -> str:
    """Return what an escape stands for; a wrong one stands for itself."""
    text = escape[0]
    if text[1] != "u":
        return _SHORT.get(text[1], text)
    units = b"".join(int(one, 16).to_bytes(2, "big") for one in text.split(r"\u")[1:] if one)
    return units.decode("utf-16-be", "replace") if units else text
