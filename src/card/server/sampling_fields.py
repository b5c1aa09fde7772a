"""Fields of requests that follow from the declared settings of a text: their names, types, bounds and meanings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model

from card.config import SamplingParams
from card.config.fields import Setting, declared

B = TypeVar("B", bound=BaseModel)
_LIMITS = {"least": "ge", "above": "gt", "most": "le", "below": "lt"}  # of `Bounds`, as pydantic calls them


def names_at(door: str) -> dict[str, str]:
    """Return the settings that a door of the server takes, and the name of the field of each there."""
    names = {
        name: one.rule.in_request.name_at(door, name)
        for name, one in declared(SamplingParams).items()
        if one.rule.in_request is not None
    }
    return {name: field for name, field in names.items() if field}


def with_fields(base: type[B], door: str) -> type[B]:
    """Return a body with the fields of these settings, besides those of ``base``."""
    settings = declared(SamplingParams)
    fields: dict[str, Any] = {field: _typed(settings[name]) for name, field in names_at(door).items()}
    return create_model(f"{base.__name__}At{door.title()}", __base__=base, **fields)


def field_of(name: str) -> Any:
    """Return the default, the bounds and the meaning of a setting as pydantic takes them."""
    one = declared(SamplingParams)[name]
    given = one.rule.in_request
    bounds = one.rule.bounds if given is None or given.bounds is None else given.bounds
    limits: dict[str, Any] = {
        limit: value
        for bound, limit in _LIMITS.items()
        if (value := getattr(bounds, bound)) is not None and math.isfinite(value)
    }
    if one.kind is int and not limits.keys() & {"le", "lt"}:
        limits["lt"] = 2**63  # what the engine has room for
    words = f"{one.rule.meaning} {given.words if given is not None else ''}".strip()
    return Field(one.default, description=words, **limits)


def settings_in(fields: BaseModel, door: str) -> dict[str, Any]:
    """Return the settings that a request states, each the nearest value that a setting may have."""
    settings, names = declared(SamplingParams), names_at(door)
    return {name: settings[name].nearest(getattr(fields, field)) for name, field in names.items()}


def same_at(door: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a completion that say the same as those of another door."""
    return {name: given[field] for name, field in names_at(door).items()}


def _typed(one: Setting) -> tuple[Any, Any]:
    return one.kind | None if one.is_optional else one.kind, field_of(one.name)
