"""The decoding methods, one module each, found by their module's name: it holds one `Method`, named METHOD."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from card.errors import SettingsError
from card.methods.method import Method

__all__ = ["METHODS", "Method", "find_method"]


def _all_methods() -> dict[str, Method]:
    modules = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "method"]
    methods: list[Method] = [import_module(f"{__name__}.{name}").METHOD for name in modules]
    return {method.name: method for method in methods}


METHODS = _all_methods()


def find_method(name: str) -> Method:
    """Return the method of this name. Raises: SettingsError for an unknown one."""
    if name not in METHODS:
        raise SettingsError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]
