"""The settings of an engine as keyword arguments, for type checkers at run time.

Editors and type checkers of source read `keywords.pyi`, which scripts/make_keywords.py writes from the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Union

from card.config.drafting import DraftSettings
from card.config.fields import Setting, declared, described
from card.config.splitting import engine_settings

NAMED_ARGUMENTS = frozenset({"target", "draft", "method"})  # fields that are separate arguments of `LLM`


def of_engine() -> Mapping[str, Setting]:
    """Return the settings of an engine that are no arguments of their own."""
    return {name: one for name, one in engine_settings().items() if name not in NAMED_ARGUMENTS}


def _given(one: Setting) -> Any:
    """Return the type by which a setting is given: for a list one value alone, or any sequence of them."""
    kind = Literal[one.choices] if one.choices else one.kind
    kinds = (kind, Sequence[kind]) if one.is_list else (kind,)
    return Union[(*kinds, None) if one.is_optional else kinds]  # noqa: UP007  # of a number that varies


def _as_keywords(name: str, settings: Mapping[str, Setting]) -> Any:
    return TypedDict(name, {key: _given(one) for key, one in settings.items()}, total=False)  # type: ignore[misc]


DraftKeywords = _as_keywords("DraftKeywords", declared(DraftSettings))
DraftKeywords.__doc__ = "Fields of `DraftSettings`."

LLMSettings = _as_keywords("LLMSettings", {**declared(DraftSettings), **of_engine()})
LLMSettings.__doc__ = f"""Settings of `card.LLM` and `card.AsyncLLM` besides target, draft and method.

The engine:
{described(of_engine())}

Drafting, as in `card.DraftSettings`:
{described(declared(DraftSettings))}
"""
