"""The decoding methods by name."""

from card.errors import SettingsError
from card.methods.card import CARD
from card.methods.method import Method
from card.methods.sps import SPS
from card.methods.vanilla import VANILLA

__all__ = ["METHODS", "Method", "find_method"]

METHODS = {method.name: method for method in (VANILLA, SPS, CARD)}


def find_method(name: str) -> Method:
    """Return the method of this name. Raises: SettingsError for an unknown one."""
    if name not in METHODS:
        raise SettingsError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]
