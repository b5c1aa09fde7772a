"""Values of arguments that a model writes as text, in JSON."""

from __future__ import annotations

import ast
import json
from typing import Any


def is_text_only(schema: Any) -> bool:
    """Return whether a schema allows nothing but texts; without a schema a value may be anything."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None and isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return all(isinstance(one, str) for one in schema["enum"])
    return kind in ("string", ["string"])


def json_of(text: str, schema: Any) -> str:
    """Return a value that was written as text in JSON: as its schema says, else what it looks like."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
        return stripped if _fits(value, schema) else json.dumps(text, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    by_name = {"true": True, "false": False, "none": None, "null": None}
    if stripped.lower() in by_name and not is_text_only(schema):
        return json.dumps(by_name[stripped.lower()])
    if stripped.startswith(("{", "[", "(", "'")):
        try:
            value = ast.literal_eval(stripped)
            if _fits(value, schema):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _fits(value: Any, schema: Any) -> bool:
    """Return whether a value has one of the types that a schema names; it may name none."""
    return isinstance(value, tuple(_types(schema)) or object)


def _types(schema: Any) -> set[type]:
    """Return the types of the values that a schema allows; none if it does not tell, or names others."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    if isinstance(names, list):
        return {kind for name in names if isinstance(name, str) for kind in _TYPES.get(name, ())}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return {type(one) for one in listed}
    options = schema.get("anyOf", schema.get("oneOf"))
    allowed = [_types(one) for one in options] if isinstance(options, list) else []
    return set().union(*allowed) if all(allowed) else set()
