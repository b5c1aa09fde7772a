"""Grammars of tool calls: required calls, optional calls that must be valid, calls or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from card.config import Grammar
from card.server.guided import LENIENT
from card.server.tool_schemas import FunctionDefinition
from card.server.tools.formats import ToolFormat

_ARGUMENTS_OPTIONS = {"whitespace_pattern": " ?"}  # as models write calls
_CONTENT_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,20})?"}  # as in other answers in JSON, but bounded
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


_LISTED = ("properties", "$defs", "definitions")  # hold schemas by name
_ALTERNATIVES = ("anyOf", "oneOf", "prefixItems")
# With one of these, an object may have properties that are not listed beside it.
_OPENING = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
)


class ToolGrammar:
    """Writes grammars in Lark's notation for one format and the functions that may be called."""

    def __init__(
        self,
        form: ToolFormat,
        functions: Sequence[FunctionDefinition],
        mark_ids: Mapping[str, int],
        *,
        allows_several: bool,
    ) -> None:
        """Set the format and the functions.

        Args:
            mark_ids: token ids of the format's marks that are special tokens; llguidance accepts no other text for
                them.
            allows_several: there may be more than one call.
        """
        self._format, self._mark_ids = form, mark_ids
        self._joint = form.joint if allows_several else None
        self._block_joint = form.block_joint if allows_several else None
        heads = []
        self._rules = []
        for idx, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function.name)}, "{form.arguments_key}": '
            heads.append(f"{json.dumps(head)} arguments_{idx}")
            self._rules.append(f"arguments_{idx}: %json {json.dumps(_schema(function))}")
        self._rules.append(f'call: ({" | ".join(heads)}) "}}"')

    def forced(self) -> Grammar:
        """Return the grammar of a text of calls only, at least one."""
        block = self._block("" if self._format.is_bare else self._marker())
        return self._grammar(f"start: {_repeated('block', self._block_joint)}", f"block: {block}")

    def free(self) -> Grammar:
        """Return the grammar of a text in which everything that begins like a call is a call."""
        if self._format.is_bare:
            return self._grammar(
                "start: block | free", f"block: {self._block('')}", "free: FREE?", r"FREE: /\s*[^{\s](.|\n)*/"
            )
        marker = self._format.marker
        begin = ["begin: spelled", f"spelled[lazy]: TEXT {json.dumps(marker)}"]
        if marker in self._mark_ids:
            begin[0] += f" | text {self._marker()}"
        several = self._joint is not None or self._block_joint is not None
        return self._grammar(
            "start: block* text" if several else "start: block | text",
            f"block: {self._block('begin')}",
            *begin,
            "text: TEXT",
            r"TEXT: /(.|\n)*/",
        )

    def or_json(self, schema: str) -> Grammar:
        """Return the grammar of a text that is calls, or JSON that fits a schema."""
        block = self._block("" if self._format.is_bare else self._marker())
        content = json.loads(schema)
        content["x-guidance"] = {**_CONTENT_OPTIONS, **content.get("x-guidance", {})}
        return self._grammar(
            f"start: {_repeated('block', self._block_joint)} | content",
            f"block: {block}",
            f"content: %json {json.dumps(content)}",
        )

    def _marker(self) -> str:
        return self._literal(self._format.marker)

    def _literal(self, text: str) -> str:
        """Return text as a grammar's literal, which may end with a special token."""
        for mark, token_id in self._mark_ids.items():
            if text.endswith(mark):
                return f"{self._literal(text.removesuffix(mark))} <[{token_id}]>".lstrip()
        return json.dumps(text) if text else ""

    def _block(self, begin: str) -> str:
        opening, closing = self._literal(self._format.opening), self._literal(self._format.closing)
        return " ".join(filter(None, (begin, opening, _repeated("call", self._joint), closing)))

    def _grammar(self, *rules: str) -> Grammar:
        return Grammar("lark", "\n".join((*rules, *self._rules)))


def _repeated(rule: str, joint: str | None) -> str:
    return rule if joint is None else f"{rule} ({json.dumps(joint)} {rule})*"


def _schema(function: FunctionDefinition) -> dict[str, object]:
    """Return the schema of a function's arguments, with options for the compiler."""
    if function.parameters is None:
        return {**_NO_ARGUMENTS, "x-guidance": _ARGUMENTS_OPTIONS}
    options = {**_ARGUMENTS_OPTIONS, **(LENIENT if function.strict is False else {})}
    return {"type": "object", **_closed(function.parameters), "x-guidance": options}


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
