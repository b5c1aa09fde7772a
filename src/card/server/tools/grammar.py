"""Grammars of answers: required calls, optional calls that must be valid, calls or JSON, behind a model's thoughts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from card.config import Grammar
from card.server.errors import bad_request
from card.server.guided import LENIENT
from card.server.tool_schemas import FunctionDefinition
from card.server.tools.call_rules import CallRules, rules_of
from card.text.compiling import JSON_OPTIONS, with_options
from card.text.parts.answer_format import AnswerFormat, Part
from card.text.parts.leads import Lead, put_behind

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


_LISTED = ("properties", "$defs", "definitions")  # hold schemas by name
_ALTERNATIVES = ("anyOf", "oneOf", "prefixItems")
# With one of these, an object may have properties that are not listed beside it.
_OPENING = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """The rules of an answer, whatever part of it the prompt has begun."""

    form: AnswerFormat
    mark_ids: Mapping[str, int]  # of marks that are tokens
    functions: tuple[FunctionDefinition, ...] = ()
    content: Grammar | None = None
    is_forced: bool = False  # only calls
    allows_several: bool = True
    thinking_budget: int | None = None

    @property
    def holds_calls(self) -> bool:
        """True if a grammar holds the calls."""
        is_held = self.is_forced or self.content is not None or any(one.strict for one in self.functions)
        return bool(self.functions) and is_held

    def grammar(self, part: Part | None) -> Grammar | None:
        """Return the grammar of an answer; None for any text.

        Args:
            part: that the prompt has begun; None: the format's first.
        Raises: ApiError 400 for a budget that this model's thoughts cannot have.
        """
        lead = Lead(self.form, self.mark_ids, part, self.thinking_budget)
        has_budget = self.thinking_budget is not None and lead.has_thoughts
        if has_budget and not lead.can_be_limited:
            raise bad_request(
                "the thoughts of this model do not end with a token, so they can have no thinking_budget; leave it out",
                "thinking_budget",
            )
        if not self.holds_calls:
            return put_behind(lead, self.content) if self.content is not None or has_budget else None
        grammars = ToolGrammar(self.form, self.functions, lead, allows_several=self.allows_several)
        if self.is_forced:
            return grammars.forced()
        if self.content is not None:
            return grammars.or_json(self.content.source or '{"type": "object"}')
        return grammars.free()


class ToolGrammar:
    """Writes grammars in Lark's notation for one format and the functions that may be called."""

    def __init__(
        self, form: AnswerFormat, functions: Sequence[FunctionDefinition], lead: Lead, *, allows_several: bool
    ) -> None:
        """Set the format and the functions.

        Args:
            lead: what may stand before the calls.
            allows_several: there may be more than one call.
        """
        self._lead = lead
        named = [(function.name, _schema(function)) for function in functions]
        self._calls: CallRules = rules_of(form, lead, named, allows_several=allows_several)

    def forced(self) -> Grammar:
        """Return the grammar of a text of calls only, at least one."""
        return self._grammar(f"start: {self._lead.before_calls()} calls", f"calls: {self._calls.blocks}")

    def free(self) -> Grammar:
        """Return the grammar of a text in which everything that begins like a call is a call."""
        before = self._lead.before_calls()
        if self._calls.is_bare and not self._lead.is_begun:
            return self._grammar(
                f"start: {before} (calls | free)",
                f"calls: {self._calls.blocks}",
                "free: FREE?",
                r"FREE: /\s*[^{\s](.|\n)*/",
            )
        if self._lead.is_channelled:
            content = f"{self._lead.before_content()} TEXT"
            text = r"TEXT: /(.|\n)*/"
            return self._grammar(f"start: {before} calls | {content}", f"calls: {self._calls.blocks}", text)
        begin = ["begin: spelled", f"spelled[lazy]: TEXT {json.dumps(self._calls.marker)}"]
        if "<[" in self._calls.marker_term:
            begin[0] += f" | text {self._calls.marker_term[self._calls.marker_term.index('<[') :]}"
        marks = self._lead.marks_in_content()
        start = f"{before} ({'block* text' if self._calls.has_several else 'block | text'})"
        if self._lead.is_begun:
            start = f"{self._calls.blocks} | {self._lead.before_content()} {start}"
        return self._grammar(
            f"start: {start}",
            f"block: begin {self._calls.body}",
            *begin,
            f"text: TEXT (({' | '.join(marks)}) TEXT)*" if marks else "text: TEXT",
            r"TEXT: /(.|\n)*/",
        )

    def or_json(self, schema: str) -> Grammar:
        """Return the grammar of a text that is calls, or JSON that fits a schema."""
        content = with_options(json.loads(schema), JSON_OPTIONS)
        before_calls, before_content = self._lead.before_calls(), self._lead.before_content()
        return self._grammar(
            f"start: {before_calls} calls | {before_content} content",
            f"calls: {self._calls.blocks}",
            f"content: %json {json.dumps(content)}",
        )

    def _grammar(self, *rules: str) -> Grammar:
        return Grammar("lark", "\n".join((*rules, *dict.fromkeys(self._lead.rules), *self._calls.rules)))


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of a function's arguments, with options for the compiler."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    schema = {"type": "object", **_closed(function.parameters)}
    return schema if function.strict else with_options(schema, LENIENT)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the listed properties, unless it explicitly allows others.

    Schemas made from signatures and classes do not mention other properties, and functions fail on unknown ones.
    """
    closed = dict(schema)
    for key in _LISTED:
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(one) if isinstance(one, dict) else one for name, one in schema[key].items()}
    for key in _ALTERNATIVES:
        if isinstance(schema.get(key), list):
            closed[key] = [_closed(one) if isinstance(one, dict) else one for one in schema[key]]
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    if isinstance(schema.get("properties"), dict) and not _OPENING & schema.keys():
        closed["additionalProperties"] = False
    return closed
