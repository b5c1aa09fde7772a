"""Several targets beside one drafter in virtual time: what the model of a pool is held against."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from card.planner.scene import build_stage, make_drafter, plan_method
from card.planner.simulate import Simulator, VirtualRun, decode, summary_of
from card.planner.virtual import VirtualClock, VirtualDrafter, World
from card.workers.metrics import RequestStats


def _present(clock: VirtualClock) -> float:
    return clock.now


class SharedWorld(World):
    """Several targets and their one drafter. Each target has a thread; one at a time runs, the furthest behind."""

    def __init__(self, drafter: VirtualDrafter, clocks: Sequence[VirtualClock]) -> None:
        super().__init__(drafter, clocks)
        self._turns = [threading.Semaphore(0) for _ in clocks]
        self._yielded = threading.Semaphore(0)
        self._wake_at: list[Callable[[], float] | None] = [partial(_present, clock) for clock in clocks]
        self._errors: list[BaseException] = []

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run one job for each target, from the present of its clock on. Raises: what a job raises."""
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
            self.clocks[idx].now = at
            self._turns[idx].release()
            self._yielded.acquire()
        if self._errors:
            raise self._errors[0]
        for thread in threads:
            thread.join()

    def reach(self, target_idx: int) -> None:
        """Let everything happen that comes before the target's present."""
        now = self.clocks[target_idx].now
        self._sleep(target_idx, lambda: now)

    def wait(self, target_idx: int, deadline: float) -> None:
        """Let the target wait for a message, until the deadline at most."""
        now = self.clocks[target_idx].now

        def wake_at() -> float:
            arrival = self.drafter.first_arrival(target_idx)
            return deadline if arrival is None else max(now, min(arrival, deadline))

        self._sleep(target_idx, wake_at)

    def _sleep(self, target_idx: int, wake_at: Callable[[], float]) -> None:
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


def run_shared(
    simulator: Simulator, method: str, settings: Mapping[str, Any] | None = None, *, num_targets: int
) -> tuple[VirtualRun, ...]:
    """Run one method on several targets that share one draft server, each busy with one text after the other.

    Each target begins with another text.
    """
    scene, changes = simulator.scene, dict(settings or {})
    plan = plan_method(scene, method, changes)
    texts = simulator.texts(plan)
    clocks = [VirtualClock() for _ in range(num_targets)]
    world = SharedWorld(make_drafter(scene, plan, texts, num_targets), clocks)
    stages = [build_stage(scene, plan, texts, clock=clocks[i], shared=(world, i)) for i in range(num_targets)]
    found: list[list[RequestStats]] = [[] for _ in stages]

    def job(idx: int) -> None:
        order = [(idx + step) % len(texts.prompts) for step in range(len(texts.prompts))]
        decode(stages[idx], scene, texts, order[:1], first_id=0)  # what a policy learns at first does not count
        found[idx] = decode(stages[idx], scene, texts, order, first_id=len(order))

    world.run([partial(job, idx) for idx in range(num_targets)])
    return tuple(summary_of(plan, changes, stats, 0.0, is_batch=False) for stats in found)
