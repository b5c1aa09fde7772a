"""The models that our own pass does not run: what loads and runs them is imported when one is met."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from card.errors import MissingError
from card.machine.importing import load_module, needs_torch

_NEEDED = ("torch", "transformers")


def has_transformers() -> bool:
    """Return whether what runs them is installed."""
    return all(find_spec(package) is not None for package in _NEEDED)


def torch_module(module: str, why: str) -> Any:
    """Return a module of `card.backends`.

    Args:
        why: what asks for it, in words that precede the command which installs it.
    Raises: MissingError if the packages that it needs are not installed.
    """
    if not has_transformers():
        raise MissingError(needs_torch(why))
    return load_module(f"card.backends.{module}", why)
