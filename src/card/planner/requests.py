"""What `card profile` and `card plan --pool` can be asked for. Quick to import, as their help needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from card.config.fields import check, setting
from card.errors import PlanError

_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_CONTEXTS = (32, 256, 768)
_BATCHES = (1, 4)


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to measure."""

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    target_cost: str | None = None
    threads: tuple[int, ...] = setting(
        (), "Numbers of CPU threads to measure, such as 1,2.", least=1, shown="torch's own"
    )
    tokens: tuple[int, ...] = setting(_TOKENS, "New tokens of a sequence.", least=1, shown=_listed(_TOKENS))
    contexts: tuple[int, ...] = setting(_CONTEXTS, "Rows that it holds before.", least=1, shown=_listed(_CONTEXTS))
    batches: tuple[int, ...] = setting(_BATCHES, "Sequences.", least=1, shown=_listed(_BATCHES))
    num_runs: int = setting(9, "Timed runs of each pass.", least=1)  # after one that does not count
    command: str = ""

    def __post_init__(self) -> None:
        check(self, error=PlanError)
        for name in ("tokens", "contexts", "batches", "threads"):
            axis = getattr(self, name)
            if list(axis) != sorted(set(axis)):
                raise PlanError(f"{name} must be different numbers of 1 or more in rising order, got {axis}")
        if len(self.tokens) < 2 or not self.contexts or not self.batches:
            raise PlanError("a profile needs two sizes of tokens or more, a context and a batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What to ask of a pool of targets."""

    method: str = setting("card", "Pool: the method of all targets.")
    delays_s: tuple[float, ...] = setting((0.0,), "Delays of the network, one way.", least=0)
    loads: tuple[float, ...] = setting(
        (0.3, 0.7, 1.0),
        "Pool: share of time that a target is busy with a drafter of its own; 1: always.",
        above=0,
        below=math.inf,
        shown="0.3,0.7,1",
    )
    min_speed_up: float | None = setting(None, "Pool: over plain decoding.", above=0, shown="90 % of one target's")
    max_targets: int = setting(4096, "Pool: no more are tried.", least=1)

    def __post_init__(self) -> None:
        check(self, error=PlanError)
        if not self.delays_s or not self.loads:
            raise PlanError("a pool study needs delays of 0 ms or more and loads above 0")
