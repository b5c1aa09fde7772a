"""How many drafters a pool should have."""

from __future__ import annotations

import math
from typing import Any


def by_targets(ctx: Any, targets_per_drafter: float = 4.0, figure: str = "targets") -> tuple[int, dict[str, Any]]:
    """Return the drafters for the targets that are served now, as Serve asks its policies; one at least.

    Serve itself keeps to the bounds and the delays.

    Args:
        ctx: Serve's `AutoscalingContext`.
        targets_per_drafter: busy targets for which there is one more.
        figure: name under which drafters record their number of targets.
    """
    by_replica = (ctx.aggregated_metrics or {}).get(figure, {})
    return max(1, math.ceil(sum(by_replica.values()) / targets_per_drafter)), {}
