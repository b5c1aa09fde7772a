"""How many drafters a pool should have."""

from __future__ import annotations

import math
from typing import Any

LOAD = "targets"  # the figure that drafters tell Serve: how many targets each of them serves


class ByTargets:
    """Asks for one drafter for so many busy targets, and for one at least; Serve keeps to the bounds and delays."""

    def __init__(self, targets_per_drafter: float) -> None:
        self._targets_per_drafter = targets_per_drafter

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of drafters, and nothing to remember.

        Args:
            ctx: Serve's `AutoscalingContext`.
        """
        by_replica = (ctx.aggregated_metrics or {}).get(LOAD, {})
        return max(1, math.ceil(sum(by_replica.values()) / self._targets_per_drafter)), {}
