"""The available methods, commands, writers and settings: those of folders beside the core, and of other packages."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

from card.config.engine import EngineSettings
from card.config.fields import declared
from card.config.method import Method
from card.config.record import Command, Record
from card.errors import SettingsError, did_you_mean

logger = logging.getLogger(__name__)
_GROUPS = ("backends", "family", "inside", "tools", "labs")  # packages whose folders may have a record
_ENTRY_POINTS = ("card.methods", "card.commands")


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record, and its origin: a folder of this package, or the name of another package."""

    record: Record
    origin: str


@cache
def records() -> tuple[FoundRecord, ...]:
    """Return all records. An unreadable one is left out, with a line in the log.

    Tests that add a folder call ``records.cache_clear()``, and that of `methods`.
    """
    return (*_of_folders(), *_of_packages())


def _of_folders() -> Iterable[FoundRecord]:
    for group in _GROUPS:
        if find_spec(f"card.{group}") is None:
            continue
        for folder in pkgutil.iter_modules(import_module(f"card.{group}").__path__):
            place = Path(getattr(folder.module_finder, "path", "")) / folder.name / "record.py"
            if place.is_file():  # checked on disk, as importing a folder without a record may take long
                record = import_module(f"card.{group}.{folder.name}.record").RECORD
                yield FoundRecord(record, f"{group}/{folder.name}")


def _of_packages() -> Iterable[FoundRecord]:
    for group in _ENTRY_POINTS:
        for point in metadata.entry_points(group=group):
            origin = point.dist.name if point.dist is not None else point.value
            try:
                record = point.load()
            except Exception as error:  # foreign code may raise anything
                logger.warning("%s of %s cannot be loaded, and is left out: %r", point.name, origin, error)
                continue
            if isinstance(record, Record):
                yield FoundRecord(record, origin)
            else:
                logger.warning("%s of %s is not a record, and is left out", point.name, origin)


@cache
def methods() -> Mapping[str, Method]:
    """Return all methods by name, in alphabetical order."""
    by_name = {method.name: method for entry in records() for method in entry.record.methods}
    return dict(sorted(by_name.items(), key=itemgetter(0)))


def origin_of(method: str) -> str:
    """Return the origin of a method."""
    return next(entry.origin for entry in records() if any(one.name == method for one in entry.record.methods))


def find_method(name: str) -> Method:
    """Return the method of this name. Raises: SettingsError for an unknown one."""
    if name in methods():
        return methods()[name]
    meant, known = did_you_mean(name, methods()), ", ".join(methods())
    raise SettingsError(f"unknown method {name!r};{f' {meant}' if meant else ''} known: {known}")


def commands(group: str = "") -> dict[str, Command]:
    """Return the commands of folders and packages by the last word of their names: of a group, or without a group."""
    commands = (command for one in records() for command in one.record.commands)
    return {one.name.rpartition(" ")[2]: one for one in commands if one.name.rpartition(" ")[0] == group}


def writer_places() -> Mapping[str, str]:
    """Return the places of the local writers of folders, by name."""
    return {name: place for entry in records() for name, place in entry.record.writers.items()}


def settings_of_methods() -> tuple[str, ...]:
    """Return the names of the settings that methods and local writers read."""
    of_methods = (name for method in methods().values() for name in method.reads)
    return tuple(dict.fromkeys((*of_methods, *settings_of_writers(writer_places()))))


def settings_of_writers(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the settings of the folders that these local writers are in."""
    kinds = (one.record.settings for one in records() if not one.record.writers.keys().isdisjoint(names))
    return tuple(name for kind in kinds if kind is not None for name in declared(kind))


def own_kinds() -> tuple[type[Any], ...]:
    """Return the dataclasses of settings that folders declare."""
    return tuple(entry.record.settings for entry in records() if entry.record.settings is not None)


def own_settings() -> Mapping[str, type[Any]]:
    """Return the class that declares each setting of a folder, by the setting's name."""
    return {name: kind for kind in own_kinds() for name in declared(kind)}


def own_value(settings: EngineSettings, name: str) -> Any:
    """Return the value of a setting that a folder declares; its default if it was not set."""
    return getattr(settings.of(own_settings()[name]), name)


def plugin_places(name: str) -> list[str]:
    """Return the places that records give in a field of this name, such as "verifier"."""
    return [place for entry in records() if (place := getattr(entry.record, name))]
