"""The decoding methods: every `Method` that a module of this package holds."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from card.errors import SettingsError, known_instead
from card.methods.method import Method

__all__ = ["METHODS", "OWN_SETTINGS", "STEPWISE", "Method", "find_method"]

STEPWISE = "arbitrage"  # of two engines that share an answer, so none of a single one: see `card.labs.steps`


def all_methods() -> dict[str, Method]:
    """Return the methods that the modules of this package define, by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Method)}
    return dict(sorted(found.items()))


METHODS = all_methods()
OWN_SETTINGS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.reads))


def find_method(name: str) -> Method:
    """Return the method of this name. Raises: SettingsError for an unknown one."""
    if name == STEPWISE:
        raise SettingsError(
            f"method {name} shares an answer between two engines; take card generate --method {name}, or "
            "card.steps.Arbitrage in Python"
        )
    if name not in METHODS:
        raise SettingsError(f"unknown method {name!r}; {known_instead(name, METHODS)}")
    return METHODS[name]
