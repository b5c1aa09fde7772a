"""Number of targets that one drafter can serve: a simple model of a pool, with figures from virtual runs of workers.

A drafter makes one pass for the beams of all targets that have something to expand. So with more targets each pass
takes longer, and each target sees a slower drafter. `measure_service` runs the real workers to find a target's speed
beside a drafter that is slower by a factor. `PoolModel` derives that factor for a number of targets and a load from the
cost of the drafter's passes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from card.errors import PlanError
from card.links.server import ServerLimits
from card.machine.pass_cost import PassCost
from card.tools.planner.profile import Overheads
from card.tools.planner.requests import PoolRequest
from card.tools.planner.scenario import Scenario, plan_method, setups_of
from card.tools.planner.simulate import Simulator, VirtualRun, sample_texts

DEFAULT_SLOWDOWNS = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 64.0)
_SETTLED = 1e-6  # relative change of the slow-down at which it counts as found
_MOST_STEPS = 500
_MOST_COMMIT_SHARE = 0.95  # of a drafter's time, that corrections can take
_WORTH_OF_ONE = 0.9  # of the speed that one target alone has with the drafter, unless another one is asked for
_SHOWN_TARGETS = tuple(2**power for power in range(13))


@dataclass(frozen=True, slots=True)
class ServiceCurve:
    """One target beside a slower drafter: a value for each factor by which it is slower."""

    method: str
    slowdowns: tuple[float, ...]  # rising, from 1 on
    tokens_per_s: tuple[float, ...]
    busy_share: tuple[float, ...]  # share of the time in which the drafter has something to expand for the target
    rounds_per_s: tuple[float, ...]
    nodes_per_pass: float
    context_rows: float
    plain_tokens_per_s: float

    def at(self, values: Sequence[float], slowdown: float) -> float:
        """Interpolate one of the above between the measured factors, on a logarithmic scale."""
        return float(np.interp(np.log(max(slowdown, 1.0)), np.log(self.slowdowns), values))


@dataclass(frozen=True, slots=True)
class PoolRun:
    """Figures of a pool under a load, on average."""

    num_targets: int
    tokens_per_s: float  # of one request while it is decoded
    speed_up: float  # of it, over plain decoding
    busy_targets: float


def measure_service(
    scenario: Scenario, method: str = "card", slowdowns: Sequence[float] = DEFAULT_SLOWDOWNS
) -> ServiceCurve:
    """Run one target beside slower and slower drafters.

    Args:
        scenario: with the delay of the network.
        slowdowns: rising, from 1 on.
    Raises: PlanError for a scenario without a network or a drafter.
    """
    if scenario.network_s is None or scenario.draft is None:
        raise PlanError("a pool needs a draft model and the delay of a network, 0 or more")
    idxs = sample_texts(scenario)
    runs = [Simulator(replace(scenario, draft_factor=by)).run(method, text_idxs=idxs) for by in slowdowns]
    plain = Simulator(scenario).run("vanilla", text_idxs=idxs)
    cost = _pass_cost(scenario, method)
    texts = scenario.recording.texts
    mean_len = sum(len(t.prompt_ids) + len(t.token_ids) / 2 for t in texts) / len(texts)
    return ServiceCurve(
        method=method,
        slowdowns=tuple(slowdowns),
        tokens_per_s=tuple(run.tokens_per_s for run in runs),
        busy_share=tuple(min(1.0, run.total.drafter_busy_s / run.total.decode_s) for run in runs),
        rounds_per_s=tuple(run.total.target_passes / run.decode_s for run in runs),
        nodes_per_pass=_nodes_per_pass(runs[0], cost, mean_len),
        context_rows=mean_len,
        plain_tokens_per_s=plain.tokens_per_s,
    )


def _pass_cost(scenario: Scenario, method: str) -> _BeamsCost:
    assert scenario.draft is not None
    setup = setups_of(scenario, plan_method(scenario, method, {})).far_draft
    assert setup is not None
    return _BeamsCost(setup.true_cost(), scenario.draft.overheads)


@dataclass(frozen=True, slots=True)
class _BeamsCost:
    """Cost of a drafter pass for some beams of equal size."""

    cost: PassCost
    overheads: Overheads

    def seconds(self, num_beams: float, nodes: float, rows: float) -> float:
        """Return the seconds of a pass for ``num_beams`` beams of ``nodes`` nodes, each after ``rows`` rows."""
        num_tokens = max(num_beams, num_beams * nodes)
        pass_s = self.cost.seconds(num_tokens, num_beams, num_beams * rows)
        return pass_s + self.overheads.step_s + self.overheads.node_s * num_tokens


def _nodes_per_pass(run: VirtualRun, cost: _BeamsCost, rows: float) -> float:
    """Return the pass size whose cost is the average cost of a pass in a run."""
    mean_s = run.total.drafter_busy_s / max(run.total.drafter_passes, 1)
    sizes = np.arange(1, 65)
    seconds = np.maximum.accumulate([cost.seconds(1, int(size), rows) for size in sizes])
    return float(np.interp(mean_s, seconds, sizes))


class PoolModel:
    """The speed of targets that share a drafter, by their number."""

    def __init__(self, scenario: Scenario, service: ServiceCurve) -> None:
        self.service = service
        self._pass = _pass_cost(scenario, service.method)

    def run(self, num_targets: int, load: float = 1.0) -> PoolRun:
        """Return the figures of a pool under a load; 1 or more keeps all targets busy.

        A slower drafter keeps targets busy for longer, which makes it slower still; the result is the fixed point.
        Raises: PlanError for numbers out of range.
        """
        if num_targets < 1 or not load > 0:
            raise PlanError(f"a pool needs targets and a load above 0, got {num_targets} and {load}")
        alone, slowdown = self.service.tokens_per_s[0], 1.0
        for _ in range(_MOST_STEPS):
            speed = self.service.at(self.service.tokens_per_s, slowdown)
            busy_share = min(1.0, load * alone / speed)
            wanted = self._slowdown(1.0 + (num_targets - 1) * busy_share, slowdown)
            step = slowdown**0.7 * wanted**0.3  # damped, so that it converges
            if abs(step / slowdown - 1.0) < _SETTLED:
                break
            slowdown = step
        return PoolRun(num_targets, speed, speed / self.service.plain_tokens_per_s, num_targets * busy_share)

    def _slowdown(self, num_busy: float, slowdown: float) -> float:
        """Return the factor by which the drafter is slower for each busy target than for one alone, given the last.

        The other targets have something to expand in a share of their time, which grows as the drafter gets slower.
        Corrections also take some of the drafter's time.
        """
        service = self.service
        nodes, rows = service.nodes_per_pass, service.context_rows
        num_beams = 1.0 + (num_busy - 1) * service.at(service.busy_share, slowdown)
        most_beams = max(1.0, ServerLimits().max_tokens_per_pass / nodes)  # in one pass; more take turns
        pass_s = self._pass.seconds(min(num_beams, most_beams), nodes, rows) * max(1.0, num_beams / most_beams)
        commits = self._pass.overheads.commit_s * service.at(service.rounds_per_s, slowdown)
        left = 1.0 - min(_MOST_COMMIT_SHARE, num_busy * commits)
        alone_left = 1.0 - min(_MOST_COMMIT_SHARE, commits)
        return max(1.0, pass_s / self._pass.seconds(1.0, nodes, rows) * alone_left / left)


def most_targets(model: PoolModel, *, load: float, least_tokens_per_s: float, limit: int) -> int:
    """Return the most targets, ``limit`` at most, that all reach this speed; 0 if not even one does."""
    return bisect_left(range(limit), True, key=lambda num: model.run(num + 1, load).tokens_per_s < least_tokens_per_s)


# ---- a whole study ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """One delay and one load."""

    delay_s: float
    load: float
    least_tokens_per_s: float  # asked for
    most_targets: int  # that reach it
    runs: tuple[PoolRun, ...]  # by number of targets


@dataclass(frozen=True, slots=True)
class PoolStudy:
    """A whole study."""

    method: str
    plain_tokens_per_s: float
    max_targets: int
    services: tuple[ServiceCurve, ...]  # by delay
    points: tuple[PoolPoint, ...]


def make_pool_study(
    scenario: Scenario, request: PoolRequest, tell: Callable[[str], None] = lambda _: None
) -> PoolStudy:
    """Measure one target in virtual time at each delay, then predict pools of all sizes.

    Raises: PlanError, SettingsError as `measure_service`.
    """
    services: list[ServiceCurve] = []
    points: list[PoolPoint] = []
    for delay_s in request.delays_s:
        tell(f"running targets {1e3 * delay_s:g} ms away from slower and slower drafters")
        there = replace(scenario, network_s=delay_s, concurrency=1)
        service = measure_service(there, request.method)
        services.append(service)
        model = PoolModel(there, service)
        least = _WORTH_OF_ONE * service.tokens_per_s[0]
        if request.min_speed_up is not None:
            least = request.min_speed_up * service.plain_tokens_per_s
        for load in request.loads:
            most = most_targets(model, load=load, least_tokens_per_s=least, limit=request.max_targets)
            runs = tuple(model.run(num, load) for num in _SHOWN_TARGETS if num <= request.max_targets)
            points.append(PoolPoint(delay_s, load, least, most, runs))
    plain = services[0].plain_tokens_per_s
    return PoolStudy(request.method, plain, request.max_targets, tuple(services), tuple(points))
