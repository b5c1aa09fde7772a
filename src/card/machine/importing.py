"""Code that is named and imported when it is used, as it may need packages that the extra `torch` brings."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from card.errors import MissingError, SettingsError
from card.machine.packages import install_command

EXTRA = "torch"
OF_EXTRA = ("torch", "transformers", "safetensors")  # packages


def load_module(name: str, what: str = "") -> Any:
    """Return a module, imported now if needed.

    Args:
        what: needs it, in words; empty: named by the module's folder.
    Raises: MissingError if it needs PyTorch, which is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in OF_EXTRA:
            raise
        raise MissingError(needs_torch(what or ".".join(name.split(".")[2:3]))) from None


def needs_torch(what: str) -> str:
    """Return what to say to a user about something that needs PyTorch where it is not installed."""
    return f"{what} needs PyTorch and transformers, which are not installed; run {install_command(EXTRA)}"


def load_place(place: str, what: str = "") -> Any:
    """Return the object named "module:name".

    Args:
        what: as of `load_module`.
    Raises: SettingsError for another form; MissingError if it needs PyTorch, which is not installed; ImportError,
        AttributeError.
    """
    module, colon, name = place.partition(":")
    if not colon:
        raise SettingsError(f"a place must be written module:name, got {place!r}")
    return getattr(load_module(module, what), name)
