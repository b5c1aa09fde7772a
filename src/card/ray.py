"""Targets and a pool of drafters on Ray Serve: `serve run card.ray:app`. Nothing else imports it.

Needs the extra `ray`; `card.labs.ray.allocation` and `card.labs.ray.settings` do without it.
"""

from typing import TYPE_CHECKING

from card.machine.doors import door

if TYPE_CHECKING:
    from card.labs.ray.apps import app, pool

__all__ = ["app", "pool"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = door(__name__, __all__, ["card.labs.ray.apps"], needs=["ray", "ray.serve"], extra="ray")
