"""The request of `card plan --pool`. Quick to import, as its help needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from card.config.fields import check, setting
from card.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Settings of a study of a pool of targets."""

    method: str = setting("card", "Pool: the method of all targets.")
    delays_s: tuple[float, ...] = setting((0.0,), "Delays of the network, one way.", least=0)
    loads: tuple[float, ...] = setting(
        (0.3, 0.7, 1.0), "Pool: busy share of targets with drafters.", above=0, below=math.inf, shown="0.3,0.7,1"
    )
    min_speed_up: float | None = setting(None, "Pool: over plain decoding.", above=0, shown="90 % of one target's")
    max_targets: int = setting(4096, "Pool: most tried.", least=1)

    def __post_init__(self) -> None:
        check(self, error=PlanError)
        if not self.delays_s or not self.loads:
            raise PlanError("a pool study needs delays of 0 ms or more and loads above 0")
