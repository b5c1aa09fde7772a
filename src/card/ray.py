"""Targets and a pool of drafters on Ray Serve: `serve run card.ray:app`. Nothing else imports it.

Needs the extra `ray`; `card.labs.ray.allocation` and `card.labs.ray.settings` do without it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from card.errors import SettingsError
from card.machine.packages import install_command

_APPLICATIONS = ("app", "pool")


def __getattr__(name: str) -> Any:
    """Load an application when it is asked for: the table of leases needs no Ray. Raises: SettingsError without Ray."""
    if name not in _APPLICATIONS:
        raise AttributeError(f"module 'card.ray' has no attribute {name!r}; it has {', '.join(_APPLICATIONS)}")
    if find_spec("ray") is None or find_spec("ray.serve") is None:
        raise SettingsError(f"card.ray needs Ray Serve, which is not installed; run {install_command('ray')}")
    return getattr(import_module("card.labs.ray.apps"), name)
