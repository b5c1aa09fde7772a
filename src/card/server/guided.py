"""Forms of answers: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, llama.cpp's `grammar`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from card.config import Grammar
from card.server.strict import Strict
from card.text.compiling import COMPACT, MOST_CHARS, OPTIONS_KEY, is_gbnf, with_options

_SCHEMA_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string", "description": "its JSON"}]}
_JsonSchema = Annotated[Any, WithJsonSchema(_SCHEMA_SCHEMA)]
_Choices = Annotated[list[str] | None, Field(None, min_length=1, max_length=4096)]
_Source = Annotated[str | None, Field(None, min_length=1)]
# An option of llguidance: parts that it cannot enforce are left to the model instead of refused.
LENIENT = {"lenient": True}


class JsonSchema(Strict):
    """The schema that an answer must fit."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str = ""
    strict: bool | None = Field(None, description="false: parts that no grammar can enforce are left to the model")


class ResponseFormat(Strict):
    """Form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and that type needs it")
        return self

    def grammar(self) -> Grammar | None:
        """Return the grammar of this form; None for plain text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Grammar("json_object")
        schema = self.json_schema.schema_
        if self.json_schema.strict is False:
            schema = with_options(schema, LENIENT)
        return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _as_schema(value: object) -> object:
    """Return a JSON schema as text, from an object or a text."""
    if isinstance(value, dict):
        value = msgspec.json.encode(value).decode()
    if isinstance(value, str) and len(value) > MOST_CHARS:
        raise ValueError(f"may have at most {MOST_CHARS:,} characters, got {len(value):,}")
    try:
        msgspec.json.decode(str(value), type=dict[str, msgspec.Raw])  # nested values stay undecoded
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("must be a JSON schema, as an object or as its JSON") from None
    return value


def _compact(source: str) -> str:
    """Return a schema that asks for JSON without white space."""
    schema = msgspec.json.decode(source, type=dict[str, msgspec.Raw])  # nested values stay undecoded
    try:
        options = msgspec.json.decode(schema.get(OPTIONS_KEY, b"{}"), type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return source  # the library says what is wrong
    return msgspec.json.encode({**schema, OPTIONS_KEY: {**options, **COMPACT}}).decode()


class StructuredOutputs(Strict):
    """One form that an answer must have."""

    changing: ClassVar[Mapping[str, tuple[object, ...]]] = {"structural_tag": ()}

    json_: _JsonSchema = Field(None, alias="json")
    json_object: bool = False
    regex: _Source = None
    choice: _Choices = None
    grammar: _Source = Field(None, description="in Lark's notation, or in GBNF with the rule root")
    disable_any_whitespace: bool = Field(False, description="JSON has no white space between its parts")

    _check_json = field_validator("json_")(_as_schema)

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        forms = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(form is not None for form in forms) != 1:
            raise ValueError("give one of json, json_object: true, regex, choice and grammar")
        if self.disable_any_whitespace and self.json_ is None and not self.json_object:
            raise ValueError("disable_any_whitespace belongs to json and json_object; leave it out")
        return self

    def as_grammar(self) -> Grammar:
        """Return the grammar of this form. Raises: ApiError 400 for a grammar that cannot be read."""
        if self.disable_any_whitespace:
            return Grammar("json_schema", _compact(self.json_ or '{"type": "object"}'))
        if self.json_ is not None:
            return Grammar("json_schema", self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            # A terminal: thousands of texts make one automaton, but would be too many rules.
            return Grammar("lark", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, self.choice)))
        if self.grammar is not None:
            return Grammar("gbnf" if is_gbnf(self.grammar) else "lark", self.grammar)
        return Grammar("json_object")


def _or_none(value: object) -> object:
    """Read an empty grammar, which llama.cpp's clients send, as none."""
    return None if value == "" else value


class GuidedFields(Strict):
    """The fields of a request that fix the form of its answer; at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _JsonSchema = None
    guided_regex: _Source = None
    guided_choice: _Choices = None
    guided_grammar: _Source = None
    grammar_: Annotated[str | None, BeforeValidator(_or_none)] = Field(
        None, alias="grammar", description="as llama.cpp names it; an empty text counts as left out"
    )
    json_schema: _JsonSchema = Field(None, description="of the answer, as llama.cpp names it")

    _check_json = field_validator("guided_json", "json_schema")(_as_schema)

    @model_validator(mode="after")
    def _one_form(self) -> GuidedFields:
        given = self._guides()
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} contradict each other; give one of them")
        return self

    @property
    def guide(self) -> str:
        """The name of the field that fixes the form; `response_format` if none does."""
        return next(iter(self._guides()), "response_format")

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer; None for any text. Raises: ApiError 400."""
        if self.structured_outputs is not None:
            return self.structured_outputs.as_grammar()
        others = {_OTHER_NAMES[name]: self._given(name) for name in self._guides() if name in _OTHER_NAMES}
        if others:
            return StructuredOutputs.model_validate(others).as_grammar()
        return self.response_format.grammar() if self.response_format is not None else None

    def _guides(self) -> Sequence[str]:
        names = [name for name in (*_OTHER_NAMES, "structured_outputs") if self._given(name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            names.append("response_format")
        return names

    def _given(self, name: str) -> Any:
        return self.grammar_ if name == "grammar" else getattr(self, name)  # a method has that name


_OTHER_NAMES = {  # and those of `StructuredOutputs`
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    "grammar": "grammar",
    "json_schema": "json",
}
