"""How many targets one drafter can serve: a light model of a pool, whose figures come from virtual runs of the workers.

A drafter makes one pass for the beams of all targets that have something to expand. So with more targets each pass
takes longer, and each target sees a slower drafter. How fast a target is beside a drafter that is so many times slower
is found by running the real workers (`measure_service`). How much slower the drafter is for so many busy targets
follows from the cost of its passes (`PoolModel`). Requests come and go in `simulate_pool`.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from card.errors import PlanError
from card.planner.profile import Overheads, TrueCost
from card.planner.requests import PoolRequest
from card.planner.scene import Scene, plan_method, setups_of
from card.planner.simulate import Simulator, VirtualRun, sample_texts
from card.transport.server import ServerLimits

DEFAULT_SLOWDOWNS = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 64.0)
_SETTLED = 1e-6  # relative change of the slow-down at which it counts as found
_MOST_STEPS = 500
_FEWEST_REQUESTS, _MOST_REQUESTS, _ENOUGH_REQUESTS = 4, 20, 20_000  # of a target, and of a pool
_EXACT_BITS = 6  # of a number of busy targets: up to 64 of them each number counts
_MOST_COMMIT_SHARE = 0.95  # of a drafter's time, that corrections can take
_WORTH_OF_ONE = 0.9  # of the speed that one target alone has with the drafter, unless another one is asked for
_SHOWN_TARGETS = tuple(2**power for power in range(13))


@dataclass(frozen=True, slots=True)
class Service:
    """One target beside a drafter that is slower by a factor: a value for each factor."""

    method: str
    slowdowns: tuple[float, ...]  # rising, from 1 on
    tokens_per_s: tuple[float, ...]
    busy_share: tuple[float, ...]  # of the time, that the drafter has something to expand for it
    rounds_per_s: tuple[float, ...]
    nodes_per_pass: float
    context_rows: float
    plain_tokens_per_s: float

    def at(self, values: Sequence[float], slowdown: float) -> float:
        """Return one of the above between the measured factors, on a logarithmic scale."""
        return float(np.interp(np.log(max(slowdown, 1.0)), np.log(self.slowdowns), values))


@dataclass(frozen=True, slots=True)
class PoolRun:
    """What a pool did under a load."""

    num_targets: int
    load: float
    tokens_per_s: float  # of one request while it is decoded: mean over requests
    slow_tokens_per_s: float  # nine of ten requests are faster
    speed_up: float  # of the mean, over plain decoding
    busy_targets: float  # on average
    wait_s: float  # of a request before its target is free, mean
    num_requests: int


def measure_service(scene: Scene, method: str = "card", slowdowns: Sequence[float] = DEFAULT_SLOWDOWNS) -> Service:
    """Run one target beside slower and slower drafters.

    Args:
        scene: with the delay of the network.
        slowdowns: rising, from 1 on.
    Raises: PlanError for a scene without a network or a drafter.
    """
    if scene.network_s is None or scene.draft is None:
        raise PlanError("a pool needs a draft model and the delay of a network, 0 or more")
    if slowdowns[0] != 1.0 or list(slowdowns) != sorted(set(slowdowns)):
        raise PlanError(f"slow-downs of the drafter must rise from 1 on, got {tuple(slowdowns)}")
    idxs = sample_texts(scene)
    runs = [Simulator(replace(scene, draft_factor=by)).run(method, text_idxs=idxs) for by in slowdowns]
    plain = Simulator(scene).run("vanilla", text_idxs=idxs)
    cost = _pass_cost(scene, method)
    mean_len = sum(len(t.prompt_ids) + len(t.token_ids) / 2 for t in scene.recording.texts) / len(scene.recording.texts)
    return Service(
        method=method,
        slowdowns=tuple(slowdowns),
        tokens_per_s=tuple(run.tokens_per_s for run in runs),
        busy_share=tuple(min(1.0, run.drafter_busy_s / run.decode_s) for run in runs),
        rounds_per_s=tuple(run.target_passes / run.decode_s for run in runs),
        nodes_per_pass=_nodes_per_pass(runs[0], cost, mean_len),
        context_rows=mean_len,
        plain_tokens_per_s=plain.tokens_per_s,
    )


def _pass_cost(scene: Scene, method: str) -> _Pass:
    assert scene.draft is not None
    setup = setups_of(scene, plan_method(scene, method, {})).far_draft
    assert setup is not None
    return _Pass(TrueCost(setup), scene.draft.overheads)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a drafter pass takes for some beams of equal size."""

    cost: TrueCost
    overheads: Overheads

    def seconds(self, num_beams: float, nodes: float, rows: float) -> float:
        """Return the seconds, linear between whole numbers of beams."""
        low = int(num_beams)
        share = num_beams - low
        return (1 - share) * self._whole(low, nodes, rows) + (share and share * self._whole(low + 1, nodes, rows))

    def _whole(self, num_beams: int, nodes: float, rows: float) -> float:
        num_tokens = max(num_beams, round(num_beams * nodes))
        pass_s = self.cost.seconds(num_tokens, num_beams, round(num_beams * rows))
        return pass_s + self.overheads.step_s + self.overheads.node_s * num_tokens


def _nodes_per_pass(run: VirtualRun, cost: _Pass, rows: float) -> float:
    """Return the size of the passes that take as long on average as those of a run did."""
    mean_s = run.drafter_busy_s / max(run.drafter_passes, 1)
    sizes = np.arange(1, 65)
    seconds = np.maximum.accumulate([cost.seconds(1, int(size), rows) for size in sizes])
    return float(np.interp(mean_s, seconds, sizes))


class PoolModel:
    """The speed of each of so many busy targets that share a drafter."""

    def __init__(self, scene: Scene, service: Service) -> None:
        self.service = service
        self._pass = _pass_cost(scene, service.method)
        self._speeds: dict[int, float] = {}

    def slowdown(self, num_busy: int) -> float:
        """Return how many times slower the drafter is for each of ``num_busy`` targets than for one alone.

        The others have something to expand in a share of their time, which grows as the drafter gets slower.
        Corrections take of the drafter's time, too. The answer agrees with both.
        """
        found = 1.0
        for _ in range(_MOST_STEPS):
            wanted = self._slowdown_given(num_busy, found)
            step = found**0.7 * wanted**0.3  # halfway, so that it settles
            if abs(step / found - 1.0) < _SETTLED:
                break
            found = step
        return found

    def tokens_per_s(self, num_busy: int) -> float:
        """Return the speed of each of ``num_busy`` targets."""
        shift = max(0, num_busy.bit_length() - _EXACT_BITS)
        num_busy = num_busy >> shift << shift  # in large pools one more makes no odds
        speed = self._speeds.get(num_busy)
        if speed is None:
            found = self.service.at(self.service.tokens_per_s, self.slowdown(num_busy))
            speed = self._speeds[num_busy] = found
        return speed

    def _slowdown_given(self, num_busy: int, slowdown: float) -> float:
        service = self.service
        nodes, rows = service.nodes_per_pass, service.context_rows
        num_beams = 1.0 + (num_busy - 1) * service.at(service.busy_share, slowdown)
        most_beams = max(1.0, ServerLimits().max_tokens_per_pass / nodes)  # in one pass; more take turns
        pass_s = self._pass.seconds(min(num_beams, most_beams), nodes, rows) * max(1.0, num_beams / most_beams)
        commits = self._pass.overheads.commit_s * service.at(service.rounds_per_s, slowdown)
        left = 1.0 - min(_MOST_COMMIT_SHARE, num_busy * commits)
        alone_left = 1.0 - min(_MOST_COMMIT_SHARE, commits)
        return max(1.0, pass_s / self._pass.seconds(1.0, nodes, rows) * alone_left / left)


def simulate_pool(
    model: PoolModel,
    lengths: Sequence[int],
    *,
    num_targets: int,
    load: float,
    num_requests: int | None = None,
    seed: int = 0,
) -> PoolRun:
    """Let requests come to each target at random moments, and return how fast they were decoded.

    Each target answers one request after the other, in the order of their arrival; each has as many tokens as a
    recorded text drawn at random. All busy targets are equally fast at any moment.

    Args:
        lengths: of the texts, in tokens.
        load: share of the time that a target would be busy with a drafter of its own, above 0; 1 or more: always.
        num_requests: of each target on average; those of the first quarter do not count. None takes 4 to 20, fewer in
            large pools.
    Raises: PlanError for numbers out of range.
    """
    if num_requests is None:
        num_requests = max(_FEWEST_REQUESTS, min(_MOST_REQUESTS, _ENOUGH_REQUESTS // max(num_targets, 1)))
    if num_targets < 1 or num_requests < 1 or not lengths or not load > 0:
        raise PlanError(f"a pool needs targets, requests and a load above 0, got {num_targets}, {num_requests}, {load}")
    rng = np.random.default_rng(seed)
    total = num_targets * num_requests
    each_s = float(np.mean(lengths)) / model.tokens_per_s(1)
    gaps = np.zeros(total) if load >= 1.0 else rng.exponential(each_s / (load * num_targets), total)
    arrivals = np.cumsum(gaps)
    owners = np.arange(total) % num_targets if load >= 1.0 else rng.integers(0, num_targets, total)
    sizes = rng.choice(np.asarray(lengths), total)
    begun, ended, busy_s = _events(model, arrivals.tolist(), owners.tolist(), sizes.tolist())
    counted = slice(total // 4, None)
    speeds = sizes[counted] / np.maximum(ended - begun, 1e-12)[counted]
    mean = float(speeds.mean())
    return PoolRun(
        num_targets=num_targets,
        load=load,
        tokens_per_s=mean,
        slow_tokens_per_s=float(np.quantile(speeds, 0.1)),
        speed_up=mean / model.service.plain_tokens_per_s,
        busy_targets=busy_s / float(ended.max()),
        wait_s=float((begun - arrivals)[counted].mean()),
        num_requests=total,
    )


def _events(
    model: PoolModel, arrivals: Sequence[float], owners: Sequence[int], sizes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return when each request begins and ends, and the seconds that targets are busy, all of them together.

    Progress counts the tokens that any busy target has made so far.
    """
    begun, ended = np.zeros(len(sizes)), np.zeros(len(sizes))
    queues: dict[int, deque[int]] = defaultdict(deque)  # of each target, the request that runs first
    running: list[tuple[float, int]] = []  # (progress at its end, request)
    now = progress = busy_s = 0.0

    def begin(request: int) -> None:
        begun[request] = now
        heappush(running, (progress + sizes[request], request))

    next_idx = 0
    while next_idx < len(arrivals) or running:
        speed = model.tokens_per_s(len(running)) if running else 0.0
        end_at = now + (running[0][0] - progress) / speed if running else math.inf
        is_arrival = next_idx < len(arrivals) and arrivals[next_idx] <= end_at
        seconds = max(0.0, (arrivals[next_idx] if is_arrival else end_at) - now)
        now, progress, busy_s = now + seconds, progress + seconds * speed, busy_s + seconds * len(running)
        if is_arrival:
            queue = queues[owners[next_idx]]
            queue.append(next_idx)
            next_idx += 1
        else:
            progress, done = heappop(running)
            ended[done] = now
            queue = queues[owners[done]]
            queue.popleft()
        if queue and (not is_arrival or len(queue) == 1):
            begin(queue[0])
    return begun, ended, busy_s


def most_targets(
    model: PoolModel, lengths: Sequence[int], *, load: float, least_tokens_per_s: float, limit: int, seed: int = 0
) -> tuple[int, tuple[PoolRun, ...]]:
    """Return the most targets, ``limit`` at most, that are decoded for at this mean speed; 0 if not even one.

    Returns: that number, and the runs on the way, by number of targets.
    """
    runs: dict[int, PoolRun] = {}

    def is_enough(num_targets: int) -> bool:
        runs[num_targets] = simulate_pool(model, lengths, num_targets=num_targets, load=load, seed=seed)
        return runs[num_targets].tokens_per_s >= least_tokens_per_s

    good, bad = 0, 1
    while bad <= limit and is_enough(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while bad - good > max(1, good // 64):
        middle = (good + bad) // 2
        if is_enough(middle):
            good = middle
        else:
            bad = middle
    return good, tuple(runs[num] for num in sorted(runs))


# ---- a whole study --------------------------------------------------------------------------------------------------


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
            limit, seed = request.max_targets, request.seed
            most, runs = most_targets(model, lengths, load=load, least_tokens_per_s=least, limit=limit, seed=seed)
            known = {run.num_targets: run for run in runs}
            for num in _SHOWN_TARGETS:
                if num <= request.max_targets and num not in known:
                    known[num] = simulate_pool(model, lengths, num_targets=num, load=load, seed=request.seed)
            points.append(PoolPoint(delay_s, load, least, most, tuple(known[num] for num in sorted(known))))
    return PoolStudy(
        request.method, services[0].plain_tokens_per_s, request.max_targets, tuple(services), tuple(points)
    )
