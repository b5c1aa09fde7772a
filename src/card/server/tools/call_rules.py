"""Rules of calls in Lark's notation, for each way to write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from card.text.compiling import with_options
from card.text.parts.answer_format import AnswerFormat, Channels
from card.text.parts.braced_calls import BracedCalls
from card.text.parts.calls import JsonCalls, KeyedCalls, NamedCalls
from card.text.parts.leads import Lead
from card.text.parts.nested_calls import NestedCalls
from card.text.parts.python_calls import PythonCalls
from card.text.parts.tagged_calls import TaggedCalls
from card.text.parts.values import is_text_only

Named = Sequence[tuple[str, dict[str, Any]]]
_OPTIONS = {"whitespace_pattern": " ?"}  # as models write calls
_GAP = r"CALL_GAP: /\n?/"
_MOST_NESTED = 8  # objects and lists in a schema whose values are not written in JSON


@dataclass(slots=True)
class CallRules:
    """The terms of one or several blocks of calls, and the rules that they need."""

    marker: str | None  # begins a block; None: a header does
    marker_term: str
    body: str  # of a block, behind its marker
    blocks: str  # one block or several, with their marks
    rules: list[str] = field(default_factory=list)
    has_several: bool = False
    is_bare: bool = False  # a block needs no marker


def rules_of(form: AnswerFormat, lead: Lead, functions: Named, *, allows_several: bool) -> CallRules:
    """Return the rules of calls in a format."""
    made = _Rules(lead, functions)
    calls = form.calls
    match calls:
        case JsonCalls():
            return _json(calls, made, allows_several=allows_several)
        case NamedCalls():
            return _named(calls, made, allows_several=allows_several, is_begun=calls.marker == form.begun)
        case KeyedCalls():
            return _keyed(calls, made, allows_several=allows_several)
        case TaggedCalls() if form.channels is not None:
            return _in_messages(form.channels, made, _tagged_blocks(calls, made), allows_several=allows_several)
        case TaggedCalls():
            return _tagged(calls, made, allows_several=allows_several)
        case NestedCalls():
            return _nested(calls, made, allows_several=allows_several)
        case BracedCalls():
            return _braced(calls, made, allows_several=allows_several)
        case PythonCalls():
            return _python(calls, made, allows_several=allows_several)
        case _:
            assert form.channels is not None
            return _in_messages(form.channels, made, made.arguments(), allows_several=allows_several)


class _Rules:
    """Rules as they are collected."""

    def __init__(self, lead: Lead, functions: Named) -> None:
        self.lead, self.functions = lead, functions
        self.rules: list[str] = []
        self._num_values = 0

    def arguments(self) -> list[tuple[str, str]]:
        """Return each function's name and the rule of its arguments in JSON."""
        return [(name, self.value(schema, f"arguments_{idx}")) for idx, (name, schema) in enumerate(self.functions)]

    def value(self, schema: Any, name: str = "") -> str:
        self._num_values += 1
        name = name or f"value_{self._num_values}"
        whole = dict(schema) if isinstance(schema, dict) else {}
        self.rules.append(f"{name}: %json {json.dumps(with_options(whole, _OPTIONS))}")
        return name

    def rule(self, terms: str) -> str:
        """Return the name of a new rule."""
        self._num_values += 1
        name = f"part_{self._num_values}"
        self.rules.append(f"{name}: {terms}")
        return name

    def text_until(self, end: str) -> str:
        """Return a rule for any text and what ends it."""
        self.add(r"CALL_TEXT: /(.|\n)*/")
        term = self.lead.literal(end)
        self._num_values += 1
        name = f"text_{self._num_values}"
        if term.startswith("<["):
            self.rules.append(f"{name}: CALL_TEXT {term}")
        elif "<[" in term:
            self.rules.append(f"{name}: CALL_TEXT {term[term.index('<[') :]}")
        else:
            self.rules.append(f"{name}[lazy]: CALL_TEXT {term}")
        return name

    def add(self, rule: str) -> None:
        """Add a rule unless it is there."""
        if rule not in self.rules:
            self.rules.append(rule)

    def made(self, marker: str, body: str, *, joint: str | None, is_bare: bool = False) -> CallRules:
        """Return the rules of blocks.

        Args:
            joint: between blocks; None: there is one.
        """
        term = self.lead.literal(marker)
        block = self.rule(" ".join(filter(None, ("" if is_bare else term, body))))
        blocks = block if joint is None else f"{block} ({self.lead.literal(joint)} {block})*"
        return CallRules(marker, term, body, blocks, self.rules, joint is not None, is_bare)


def _repeated(rule: str, joint: str | None) -> str:
    return rule if joint is None else f"{rule} ({json.dumps(joint)} {rule})*"


def _in_messages(
    channels: Channels, made: _Rules, written: Sequence[tuple[str, str]], *, allows_several: bool
) -> CallRules:
    """Return the rules of calls that are messages, from each function's name and what its message has."""
    heads = [f"{made.lead.literal(channels.call_header.replace('{name}', name))} {terms}" for name, terms in written]
    call = made.rule(" | ".join(heads))
    joint = channels.joint if allows_several else None
    blocks = call if joint is None else f"{call} ({made.lead.literal(joint)} {call})*"
    return CallRules(None, "", "", blocks, made.rules)


def _keyed(calls: KeyedCalls, made: _Rules, *, allows_several: bool) -> CallRules:
    heads = [f"{json.dumps(f'{{{json.dumps(name)}: ')} {arguments}" for name, arguments in made.arguments()]
    call = made.rule(f'({" | ".join(heads)}) "}}"')
    body = f'"[" {_repeated(call, ", " if allows_several else None)} {made.lead.literal("]" + calls.closing)}'
    several = made.made(calls.marker, body, joint=None)
    several.has_several = allows_several
    return several


def _json(calls: JsonCalls, made: _Rules, *, allows_several: bool) -> CallRules:
    heads = []
    for name, arguments in made.arguments():
        head = f'{{"{calls.name_key}": {json.dumps(name)}, "{calls.arguments_key}": '
        heads.append(f"{json.dumps(head)} {arguments}")
    call = made.rule(f'({" | ".join(heads)}) "}}"')
    terms = (
        made.lead.literal(calls.opening),
        _repeated(call, calls.joint if allows_several else None),
        made.lead.literal(calls.closing),
    )
    joint = calls.block_joint if allows_several else None
    several = made.made(calls.marker, " ".join(filter(None, terms)), joint=joint, is_bare=calls.is_bare)
    several.has_several = allows_several and (calls.joint is not None or calls.block_joint is not None)
    return several


def _named(calls: NamedCalls, made: _Rules, *, allows_several: bool, is_begun: bool) -> CallRules:
    literal = made.lead.literal
    before = literal(calls.begin)
    if calls.before_name:
        before += f" CALL_ID {literal(calls.before_name)}"
        made.add("CALL_ID: /[0-9A-Za-z_-]{1,40}/")
    suffix = ""
    if calls.written_suffix:
        suffix = "CALL_SUFFIX"
        made.add("CALL_SUFFIX: /:[0-9]{1,4}/")
    heads = [
        " ".join(filter(None, (literal(calls.prefix + name), suffix, literal(calls.separator), arguments)))
        for name, arguments in made.arguments()
    ]
    call = made.rule(" ".join(filter(None, (before, f"({' | '.join(heads)})", literal(calls.end)))))
    if calls.begin:
        body = f"{call}{'+' if allows_several else ''} {literal(calls.closing)}"
        return made.made(calls.marker, body, joint=None)
    if is_begun:
        return made.made(calls.marker, call, joint=calls.marker if allows_several else None, is_bare=True)
    return made.made(calls.marker, call, joint="" if allows_several else None)


def _tagged(calls: TaggedCalls, made: _Rules, *, allows_several: bool) -> CallRules:
    call = made.rule(" | ".join(terms for _, terms in _tagged_calls(calls, made)))
    gap = "CALL_GAP" if calls.head[0] else ""
    closing = f"{gap} {made.lead.literal(calls.closing)}" if calls.closing != calls.end else ""
    one = f"{gap} {call}"
    inner = f"({one})+" if calls.has_several and allows_several else one
    joint = None if calls.has_several or not allows_several else "\n"
    return made.made(calls.marker, f"{inner} {closing}", joint=joint)


def _tagged_blocks(calls: TaggedCalls, made: _Rules) -> list[tuple[str, str]]:
    """Return each function's name and the terms of a block with a call of it."""
    literal = made.lead.literal
    return [
        (name, f"{literal(calls.marker)} CALL_GAP {terms} CALL_GAP {literal(calls.closing)}")
        for name, terms in _tagged_calls(calls, made)
    ]


def _tagged_calls(calls: TaggedCalls, made: _Rules) -> list[tuple[str, str]]:
    """Return each function's name and the terms of a call of it."""
    made.add(_GAP)
    literal = made.lead.literal
    heads = []
    for name, schema in made.functions:
        terms = [literal(calls.head[0] + name + calls.head[1])]
        if calls.head_end:
            made.add(f"CALL_REST: /{calls.head_rest}/")
            terms += ["CALL_REST", literal(calls.head_end)]
        terms.append("CALL_GAP")
        required = schema.get("required") or ()
        for key, value in (schema.get("properties") or {}).items():
            whole = _with_definitions(value, schema)
            pair = f"{_tagged_key(calls, made, key, whole)} "
            pair += f"CALL_GAP {literal(calls.value[0])} " if calls.value[0] else ""
            pair += _tagged_value(calls, made, whole)
            terms.append(f"({pair} CALL_GAP){'' if key in required else '?'}")
        heads.append((name, " ".join([*terms, literal(calls.end)])))
    return heads


def _tagged_key(calls: TaggedCalls, made: _Rules, key: str, schema: Any) -> str:
    """Return the terms before a value, with the attributes that tell its kind."""
    before, about = calls.key[0] + key + calls.key[1], calls.attributes
    if about is None:
        return made.lead.literal(before)
    kinds = (about.text,) if _is_text(schema) else about.others
    return f"({' | '.join(made.lead.literal(before + kind + about.end) for kind in kinds)})"


def _is_text(schema: Any) -> bool:
    """Return whether a value is written as a text."""
    return _text_choices(schema) is not None or is_text_only(schema)


def _text_choices(schema: Any) -> list[str] | None:
    """Return the texts that a schema lists; None if it lists none, or not only texts."""
    choices = schema.get("enum") if isinstance(schema, dict) else None
    is_listed = isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices)
    return choices if is_listed else None


def _tagged_value(calls: TaggedCalls, made: _Rules, schema: Any) -> str:
    end, pads = calls.value[1], calls.pads
    before = f"{json.dumps(pads)} " if pads else ""
    if (choices := _text_choices(schema)) is not None:
        return f"{before}({' | '.join(json.dumps(one) for one in choices)}) {made.lead.literal(pads + end)}"
    if is_text_only(schema):
        return before + made.text_until(pads + end)
    return f"{before}{made.value(schema)} {made.lead.literal(pads + end)}"


def _with_definitions(schema: Any, whole: dict[str, Any]) -> Any:
    """Return a part of a schema with what it may refer to."""
    if not isinstance(schema, dict):
        return {}
    shared = {name: whole[name] for name in ("$defs", "definitions", "x-guidance") if name in whole}
    return {**shared, **schema}


def _resolved(schema: Any, whole: dict[str, Any]) -> Any:
    """Return a schema, or the definition that it refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/")):
        _, place, name = reference.split("/", 2)
        return (whole.get(place) or {}).get(name)
    return schema


def _nested(calls: NestedCalls, made: _Rules, *, allows_several: bool) -> CallRules:
    made.add(_GAP)
    heads = [
        f"{made.lead.literal(calls.mark + calls.head[0] + name + calls.head[1])} "
        f"{_nested_fields(calls, made, schema, schema, 0)} {made.lead.literal(calls.mark + calls.end)} CALL_GAP"
        for name, schema in made.functions
    ]
    call = made.rule(" | ".join(heads))
    body = f"CALL_GAP {call}{'+' if allows_several else ''} {made.lead.literal(calls.closing)}"
    return made.made(calls.marker, body, joint=None)


def _nested_fields(calls: NestedCalls, made: _Rules, schema: Any, whole: dict[str, Any], depth: int) -> str:
    """Return the terms of the elements of an object."""
    required = schema.get("required") or ()
    return " ".join(
        made.rule(_nested_element(calls, made, key, value, whole, depth)) + ("" if key in required else "?")
        for key, value in (schema.get("properties") or {}).items()
    )


def _nested_element(calls: NestedCalls, made: _Rules, key: str, schema: Any, whole: dict[str, Any], depth: int) -> str:
    """Return the terms of an element; what is nested too deeply or has no type may be any text."""
    schema = _resolved(schema, whole)
    opening, end = f"{calls.mark}<{key}>", f"{calls.mark}</{key}>"
    begin, close = made.lead.literal(opening), made.lead.literal(end)
    kind = schema.get("type") if isinstance(schema, dict) and depth < _MOST_NESTED else None
    if (choices := _text_choices(schema)) is not None:
        return f"{begin} ({' | '.join(json.dumps(one) for one in choices)}) {close}"
    if kind == "object" and isinstance(schema.get("properties"), dict):
        return f"{begin} {_nested_fields(calls, made, schema, whole, depth + 1)} {close}"
    if kind == "array" and isinstance(schema.get("items"), dict):
        item = made.rule(_nested_element(calls, made, calls.item, schema["items"], whole, depth + 1))
        return f"{begin} {item}* {close}"
    if kind in ("integer", "number", "boolean"):
        return f"{begin} {made.value(schema)} {close}"
    return f"{begin} {made.text_until(end)}"


def _braced(calls: BracedCalls, made: _Rules, *, allows_several: bool) -> CallRules:
    heads = [
        f"{json.dumps(calls.head + name)} {_braced_value(calls, made, schema, schema, 0)}"
        for name, schema in made.functions
    ]
    body = f"({' | '.join(heads)}) {made.lead.literal(calls.end)}"
    return made.made(calls.marker, body, joint="" if allows_several else None)


def _braced_value(calls: BracedCalls, made: _Rules, schema: Any, whole: dict[str, Any], depth: int) -> str:
    """Return the terms of a value whose texts stand between marks; what is nested too deeply may be any JSON."""
    schema = _resolved(schema, whole)
    if not isinstance(schema, dict) or depth > _MOST_NESTED:
        return made.value({})
    choices, quote = schema.get("enum"), made.lead.literal(calls.quote)
    if isinstance(choices, list) and choices:
        listed = [
            f"{quote} {json.dumps(one)} {quote}" if isinstance(one, str) else json.dumps(json.dumps(one))
            for one in choices
        ]
        return f"({' | '.join(listed)})"
    if is_text_only(schema):
        return f"{quote} {made.text_until(calls.quote)}"
    kind = schema.get("type")
    if kind == "array":
        item = made.rule(_braced_value(calls, made, schema.get("items"), whole, depth + 1))
        return f'"[" ({item} ("," {item})*)? "]"'
    if kind == "object" and isinstance(schema.get("properties"), dict):
        return _braced_object(calls, made, schema, whole, depth)
    return made.value(_with_definitions(schema, whole))


def _braced_object(calls: BracedCalls, made: _Rules, schema: Any, whole: dict[str, Any], depth: int) -> str:
    required = schema.get("required") or ()
    pairs = [
        (made.rule(f"{json.dumps(key + ':')} {_braced_value(calls, made, value, whole, depth + 1)}"), key in required)
        for key, value in schema["properties"].items()
    ]
    return f'"{{" {_listed(made, pairs, ",")} "}}"'


def _python(calls: PythonCalls, made: _Rules, *, allows_several: bool) -> CallRules:
    heads = []
    for name, schema in made.functions:
        required = schema.get("required") or ()
        pairs = [
            (made.rule(f"{json.dumps(key + '=')} {made.value(_with_definitions(value, schema))}"), key in required)
            for key, value in (schema.get("properties") or {}).items()
        ]
        heads.append(f'{json.dumps(name + "(")} {_listed(made, pairs, ", ")} ")"')
    call = made.rule(" | ".join(heads))
    body = f'"[" {_repeated(call, ", " if allows_several else None)} {made.lead.literal("]" + calls.closing)}'
    several = made.made(calls.marker, body, joint=None)
    several.has_several = allows_several
    return several


def _listed(made: _Rules, pairs: Sequence[tuple[str, bool]], joint: str) -> str:
    """Return the terms of pairs in their order with joints between them; those not required may be missing."""
    rest = ""  # what follows a pair, joint included
    first: list[str] = []  # from each pair on that may come first
    for idx in range(len(pairs) - 1, -1, -1):
        rule, is_required = pairs[idx]
        first = [f"{rule} {rest}", *([] if is_required else first)]
        after = f"{json.dumps(joint)} {rule} {rest}"
        rest = made.rule(after) if is_required else f"({made.rule(after)} | {rest})" if rest else f"{made.rule(after)}?"
    may_be_empty = not any(is_required for _, is_required in pairs)
    if not pairs:
        return ""
    return f"({' | '.join(first)}){'?' if may_be_empty else ''}"
