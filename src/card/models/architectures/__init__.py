"""The architectures with a pass of our own, one module each, by the ``model_type`` of config.json."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module

from card.models.architectures.architecture import Architecture

__all__ = ["Architecture", "all_architectures", "find_architecture"]


def _names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != "architecture"]


def find_architecture(model_type: object) -> Architecture | None:
    """Return the entry of a ``model_type``; None if there is none."""
    if not isinstance(model_type, str) or model_type not in _names():
        return None
    entry: Architecture = import_module(f"{__name__}.{model_type}").ARCHITECTURE
    return replace(entry, model_type=model_type)


def all_architectures() -> list[Architecture]:
    """Return all entries."""
    return [entry for name in _names() if (entry := find_architecture(name)) is not None]
