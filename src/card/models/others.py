"""The models that our own pass does not run: what loads and runs them is imported when one is met."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from card.errors import ModelError
from card.machine.packages import install_command

EXTRA = "torch"
_NEEDED = ("torch", "transformers")


def has_others() -> bool:
    """Return whether what runs them is installed."""
    return all(find_spec(package) is not None for package in _NEEDED)


def others(module: str, why: str) -> Any:
    """Return a module of `card.theirs`.

    Args:
        why: what asks for it, in words that precede the command which installs it.
    Raises: ModelError if the packages that it needs are not installed.
    """
    if not has_others():
        raise ModelError(f"{why} runs through torch and transformers: {install_command(EXTRA)}")
    return import_module(f"card.theirs.{module}")
