"""Settings given by name, divided among the engine, drafting and the folders beside the core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from card.config.drafting import DraftSettings
from card.config.engine import EngineSettings
from card.config.fields import Setting, declared, refuse_unknown
from card.config.registry import methods, own_settings

_OWN = "own"  # a field of `EngineSettings`, not a setting


@cache
def engine_settings() -> Mapping[str, Setting]:
    """Return all settings of an engine by name, those of folders last.

    A setting of a folder that says nothing else is read by the methods that have it among their ``reads``.
    """
    core = {name: one for name, one in declared(EngineSettings).items() if name != _OWN}
    return core | {name: _with_readers(declared(kind)[name]) for name, kind in own_settings().items()}


def _with_readers(one: Setting) -> Setting:
    readers = one.readers or tuple(f"method {method.name}" for method in methods().values() if one.name in method.reads)
    return replace(one, rule=replace(one.rule, read_by=readers))


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of `EngineSettings` and those of `DraftSettings`. Raises: SettingsError for an unknown name."""
    own_kinds, drafting = own_settings(), declared(DraftSettings)
    refuse_unknown(settings, engine_settings().keys() | drafting.keys())
    given = {name: value for name, value in settings.items() if name in own_kinds}
    for kind in dict.fromkeys(own_kinds[name] for name in given):
        kind(**{name: value for name, value in given.items() if own_kinds[name] is kind})  # refuses invalid values
    rest = {name: value for name, value in settings.items() if name not in own_kinds}
    engine = {name: value for name, value in rest.items() if name not in drafting} | ({_OWN: given} if given else {})
    return engine, {name: value for name, value in rest.items() if name in drafting}
