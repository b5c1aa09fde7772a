"""Several targets beside one drafter in virtual time: what the model of a pool is held against."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from card.assembly.drafters import make_worker
from card.drafting.beam import BeamWriter
from card.drafting.drafter import MAX_TOKENS_PER_PASS
from card.drafting.drafter_pass import step_together
from card.drafting.messages import DrafterMessage, TargetMessage
from card.engine.metrics import RequestStats
from card.tools.planner.scenario import build_stage, draft_model, plan_method
from card.tools.planner.simulate import Simulator, VirtualRun, decode, summary_of
from card.tools.planner.virtual_time import VirtualClock


@dataclass(order=True, slots=True)
class _Arrival:
    at: float
    number: int  # in the order of sending
    target_idx: int = field(compare=False)
    message: TargetMessage = field(compare=False)


class SharedDrafter:
    """A drafter of several targets: reads what has come, makes one pass for all who want one, sends the layers."""

    def __init__(self, writer: BeamWriter, clock: VirtualClock, *, num_targets: int, delay_s: float) -> None:
        self.workers = [make_worker(writer, clock=clock, peers=lambda: self.workers) for _ in range(num_targets)]
        self._clock = clock
        self._delay_s = delay_s
        self._inbox: list[_Arrival] = []
        self._outboxes: list[deque[tuple[float, DrafterMessage]]] = [deque() for _ in range(num_targets)]
        self._num_sent = 0

    def send(self, target_idx: int, at: float, message: TargetMessage) -> None:
        self._num_sent += 1
        heappush(self._inbox, _Arrival(at + self._delay_s, self._num_sent, target_idx, message))

    def next_at(self) -> float | None:
        """Return when the next pass or message is due; None if it waits for a message not sent yet."""
        if not all(worker.is_idle for worker in self.workers):
            return self._clock.now
        return max(self._clock.now, self._inbox[0].at) if self._inbox else None

    def act(self) -> None:
        """Do what is due next: take all messages that have arrived by then, and make a pass."""
        now = self.next_at()
        assert now is not None, "nothing is due"
        self._clock.now = now
        while self._inbox and self._inbox[0].at <= self._clock.now:
            arrival = heappop(self._inbox)
            self._answer(arrival.target_idx, self.workers[arrival.target_idx].receive(arrival.message))
        for target_idx, messages in enumerate(step_together(self.workers, max_tokens=MAX_TOKENS_PER_PASS)):
            self._answer(target_idx, messages)

    def first_arrival(self, target_idx: int) -> float | None:
        """Return when the next message for a target arrives, as far as it was sent."""
        outbox = self._outboxes[target_idx]
        return outbox[0][0] if outbox else None

    def take(self, target_idx: int, until: float) -> list[DrafterMessage]:
        """Return what has arrived at a target by then."""
        outbox = self._outboxes[target_idx]
        taken = []
        while outbox and outbox[0][0] <= until:
            taken.append(outbox.popleft()[1])
        return taken

    def _answer(self, target_idx: int, messages: Sequence[DrafterMessage]) -> None:
        self._outboxes[target_idx].extend((self._clock.now + self._delay_s, message) for message in messages)


class SharedWorld:
    """Several targets and their one drafter. Each target has a thread; one at a time runs, the furthest behind."""

    def __init__(self, drafter: SharedDrafter) -> None:
        self.drafter = drafter
        self._turns = [threading.Semaphore(0) for _ in drafter.workers]
        self._yielded = threading.Semaphore(0)
        self._wake_at: list[Callable[[], float] | None] = []
        self._errors: list[BaseException] = []

    def run(self, clocks: Sequence[VirtualClock], jobs: Sequence[Callable[[], None]]) -> None:
        """Run one job for each target, from the present of its clock on. Raises: what a job raises."""
        self._wake_at = [clock for clock in clocks]
        threads = [threading.Thread(target=self._run, args=(i, job), daemon=True) for i, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        while not self._errors:
            due = [(wake_at(), idx) for idx, wake_at in enumerate(self._wake_at) if wake_at is not None]
            if not due:
                break
            at, idx = min(due)
            drafter_at = self.drafter.next_at()
            if drafter_at is not None and drafter_at <= at:
                self.drafter.act()
                continue
            self._turns[idx].release()
            self._yielded.acquire()
        if self._errors:
            raise self._errors[0]
        for thread in threads:
            thread.join()

    def sleep(self, target_idx: int, wake_at: Callable[[], float]) -> None:
        """Let everybody else act until the target wakes up."""
        self._wake_at[target_idx] = wake_at
        self._yielded.release()
        self._turns[target_idx].acquire()

    def _run(self, target_idx: int, job: Callable[[], None]) -> None:
        self._turns[target_idx].acquire()
        try:
            job()
        except BaseException as error:
            self._errors.append(error)
        self._wake_at[target_idx] = None
        self._yielded.release()


@dataclass(frozen=True, slots=True)
class Seat:
    """The drafter of several as one target sees it: what a `VirtualDrafter` is to a link."""

    world: SharedWorld
    target_idx: int

    def send(self, at: float, message: TargetMessage) -> None:
        self.world.drafter.send(self.target_idx, at, message)

    def run_until(self, now: float) -> list[DrafterMessage]:
        self.world.sleep(self.target_idx, lambda: now)
        return self.world.drafter.take(self.target_idx, now)

    def wait(self, now: float, deadline: float) -> float:
        def wake_at() -> float:
            arrival = self.world.drafter.first_arrival(self.target_idx)
            return deadline if arrival is None else max(now, min(arrival, deadline))

        self.world.sleep(self.target_idx, wake_at)
        return wake_at()


def run_shared(simulator: Simulator, method: str, *, num_targets: int) -> tuple[VirtualRun, ...]:
    """Run one method on several targets that share one draft server, each busy with one text after the other.

    Each target begins with another text.
    """
    scenario = simulator.scenario
    plan = plan_method(scenario, method, {})
    texts, clock = simulator.texts(plan), VirtualClock()
    assert scenario.network_s is not None
    writer = BeamWriter(draft_model(scenario, plan, texts, clock), kv_cache_bytes=1 << 40)
    delay_s = scenario.target.overheads.latency_s + scenario.network_s
    world = SharedWorld(SharedDrafter(writer, clock, num_targets=num_targets, delay_s=delay_s))
    stages = [build_stage(scenario, plan, texts, drafter=Seat(world, idx)) for idx in range(num_targets)]  # type: ignore[arg-type]
    found: list[list[RequestStats]] = [[] for _ in stages]

    def job(idx: int) -> None:
        order = [(idx + step) % len(texts.prompts) for step in range(len(texts.prompts))]
        decode(stages[idx], scenario, texts, order[:1], first_id=0)  # what a policy learns at first does not count
        found[idx] = decode(stages[idx], scenario, texts, order, first_id=len(order))

    world.run([stage.clock for stage in stages], [partial(job, idx) for idx in range(num_targets)])  # type: ignore[misc]
    return tuple(summary_of(plan, stats) for stats in found)
