"""The writers without a model, by name: the modules of this package and those of folders beside the core."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from card.config.registry import writer_places
from card.errors import SettingsError
from card.machine.importing import load_place

if TYPE_CHECKING:  # help lists the names and must not load torch
    from card.drafting.local.protocol import LocalWriter

__all__ = ["find_writer", "writer_names"]


def _places() -> dict[str, str]:
    names = (module.name for module in pkgutil.iter_modules(__path__) if module.name != "protocol")
    return {name: f"{__name__}.{name}:WRITER" for name in names} | dict(writer_places())


def writer_names() -> tuple[str, ...]:
    """Return the names of all local writers."""
    return tuple(sorted(_places()))


def find_writer(name: str) -> type[LocalWriter]:
    """Return the class of a writer. Raises: SettingsError for an unknown name."""
    places = _places()
    if name not in places:
        known = f"beam (the draft model), grammar (what a request's form forces), {', '.join(sorted(places))}"
        raise SettingsError(f"unknown writer {name!r}; known: {known}")
    writer: type[LocalWriter] = load_place(places[name])
    return writer
