"""The writers without a model, one module each, found by their module's name."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from card.errors import SettingsError

if TYPE_CHECKING:  # help lists the names, and must not load torch for it
    from card.drafting.local.protocol import LocalWriter

__all__ = ["find_writer", "writer_names"]


def writer_names() -> tuple[str, ...]:
    """Return the names of all local writers."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if module.name != "protocol")


def find_writer(name: str) -> type[LocalWriter]:
    """Return the class of a writer. Raises: SettingsError for an unknown name."""
    if name not in writer_names():
        raise SettingsError(f"unknown writer {name!r}; known: beam (the draft model), {', '.join(writer_names())}")
    writer: type[LocalWriter] = import_module(f"{__name__}.{name}").WRITER
    return writer
