"""Imported by a server's process: its engine dies in the tenth round of the first request."""

from __future__ import annotations

import itertools
from typing import Any

from card.engine.engine import Engine

_step = Engine.step
_rounds = itertools.count(1)


def step(self: Engine) -> Any:
    """Fail as on a machine that has no memory left."""
    if self.has_work and next(_rounds) == 10:
        raise MemoryError("told to nobody")
    return _step(self)


Engine.step = step  # type: ignore[method-assign]
