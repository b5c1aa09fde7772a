"""How many targets one drafter can serve at a given speed, over the delay of the network and over load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from card.errors import PlanError
from card.planner.pool import PoolModel, PoolRun, Service, measure_service, most_targets, simulate_pool
from card.planner.scene import Scene

_WORTH_OF_ONE = 0.9  # of the speed that one target alone has with the drafter, unless another one is asked for
_SHOWN_TARGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What to ask of a pool."""

    method: str = "card"
    delays_s: tuple[float, ...] = (0.0,)
    loads: tuple[float, ...] = (1.0,)
    min_speed_up: float | None = None  # over plain decoding; None: 90 % of what one target alone reaches
    max_targets: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.delays_s or not self.loads or min(self.loads) <= 0 or min(self.delays_s) < 0:
            raise PlanError("a pool study needs delays of 0 ms or more and loads above 0")
        if self.max_targets < 1:
            raise PlanError(f"max_targets must be 1 or more, got {self.max_targets}")


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """One delay and one load."""

    delay_s: float
    load: float
    least_tokens_per_s: float  # asked for
    most_targets: int  # that reach it on average
    runs: tuple[PoolRun, ...]  # by number of targets


@dataclass(frozen=True, slots=True)
class PoolStudy:
    """A whole study."""

    method: str
    plain_tokens_per_s: float
    max_targets: int
    services: tuple[Service, ...]  # by delay
    points: tuple[PoolPoint, ...]


def make_pool_study(scene: Scene, request: PoolRequest, tell: Callable[[str], None] = lambda _: None) -> PoolStudy:
    """Measure in virtual time what a target is worth at each delay, then let pools of all sizes run.

    Raises: PlanError, SettingsError as `measure_service`.
    """
    lengths = [len(text.token_ids) for text in scene.recording.texts]
    services: list[Service] = []
    points: list[PoolPoint] = []
    for delay_s in request.delays_s:
        tell(f"running targets {1e3 * delay_s:g} ms away from slower and slower drafters")
        there = replace(scene, network_s=delay_s, concurrency=1)
        service = measure_service(there, request.method)
        services.append(service)
        model = PoolModel(there, service)
        for load in request.loads:
            tell(f"pools {1e3 * delay_s:g} ms away under load {load:g}")
            least = _WORTH_OF_ONE * model.tokens_per_s(1)
            if request.min_speed_up is not None:
                least = request.min_speed_up * service.plain_tokens_per_s
            most, runs = most_targets(
                model,
                lengths,
                load=load,
                least_tokens_per_s=least,
                limit=request.max_targets,
                seed=request.seed,
            )
            known = {run.num_targets: run for run in runs}
            for num in _SHOWN_TARGETS:
                if num <= request.max_targets and num not in known:
                    known[num] = simulate_pool(model, lengths, num_targets=num, load=load, seed=request.seed)
            points.append(PoolPoint(delay_s, load, least, most, tuple(known[num] for num in sorted(known))))
    return PoolStudy(
        request.method, services[0].plain_tokens_per_s, request.max_targets, tuple(services), tuple(points)
    )
