"""Measurements of the models when an engine starts, or from an earlier start, and again when it is idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from card.latency.store import LatencyKey, LatencyStore
from card.latency.timing import measure_pass_cost, single_pass_takes, with_useful_threads
from card.machine.threads import CorePlan, CoreSet, pinned
from card.models.torch_runner import TorchRunner
from card.policy.cost import PassCost

FULL_S, QUICK_S = 1.0, 0.12  # for the target's latencies under one schedule: at leisure, and while somebody waits
_CHECK_RUNS, _CHANGED_FACTOR = 3, 1.6  # passes; a machine whose speed drifts by a fifth is still the same
_IDLE_S = 0.4  # the same in an idle moment: so long a request may have to wait that comes just then


class Measuring:
    """Measures a target, and remembers in a store."""

    def __init__(
        self,
        runner: TorchRunner,
        store: LatencyStore,
        model: str | None,
        *,
        max_sequences: int,
        is_quick: bool,
        more: str = "",
    ) -> None:
        """Begin.

        Args:
            model: name of the target; None for a loaded one, of which nothing is remembered.
            max_sequences: most sequences in a measured pass.
            is_quick: measure what is not known in a fraction of the time, as somebody waits for the first text.
            more: what else the latencies depend on, such as an inflated cost.
        """
        self._runner = runner
        self._store = store
        self._model = model
        self._max_sequences = max_sequences
        self._is_quick = is_quick
        self._more = more
        self._core_sets: list[CoreSet] = []  # whose latencies were asked for
        # As the files were when they were loaded. Later they may be others, or cannot be looked at.
        self._keys: dict[tuple[str, CoreSet], LatencyKey | None] = {}
        self._plan: CorePlan | None = None  # whose useful threads were asked for

    def forget_if_wrong(self, plan: CorePlan) -> None:
        """Forget what is kept if a pass contradicts it: the machine has changed, or was busy when it was measured."""
        threads = self._store.threads(self._key("threads", plan.alone))
        core_set = plan.alone if threads is None else replace(plan.alone, threads=threads)
        known = self._store.cost(self._key("pass", core_set))
        if known is None:
            return
        low_s, high_s = known.seconds(1) / _CHANGED_FACTOR, known.seconds(1) * _CHANGED_FACTOR
        with pinned(core_set):
            if single_pass_takes(self._runner, low_s, high_s, clock=time.perf_counter, num_runs=_CHECK_RUNS):
                return
        self._store.clear()

    def with_useful_threads(self, plan: CorePlan) -> CorePlan:
        """Return the plan with as many threads for the target as do not slow it down."""
        self._plan = plan
        known = [self._store.threads(key) for key in self._thread_keys(plan)]
        if all(known):
            beside, alone = known
            return replace(plan, beside=replace(plan.beside, threads=beside), alone=replace(plan.alone, threads=alone))
        return self._find_threads(plan, is_quick=self._is_quick)

    def cost(self, core_set: CoreSet) -> PassCost:
        """Return what the target's passes cost in this core_set."""
        if core_set not in self._core_sets:
            self._core_sets.append(core_set)
        limit_s = QUICK_S if self._is_quick else FULL_S
        cost = self.remembered(self._key("pass", core_set), lambda: self._measure(core_set, limit_s))
        assert cost is not None
        return cost

    def remembered(self, key: LatencyKey | None, measure: Callable[[], PassCost | None]) -> PassCost | None:
        """Return what passes cost by the store, else as measured now, which is kept."""
        cost = self._store.cost(key)
        if cost is None and (cost := measure()) is not None:
            self._store.keep_cost(key, cost, is_quick=self._is_quick)
        return cost

    def remeasure(self) -> Iterator[None]:
        """Measure what was measured in haste once more, for the next start; pauses after each part."""
        if self._plan is not None:
            keys = self._thread_keys(self._plan)
            if None not in keys and not all(self._store.threads(key, is_final=True) for key in keys):
                self._find_threads(self._plan, is_quick=False, limit_s=_IDLE_S)
                yield
        for core_set in self._core_sets:
            key = self._key("pass", core_set)
            if key is not None and self._store.cost(key, is_final=True) is None:
                self._store.keep_cost(key, self._measure(core_set, _IDLE_S), is_quick=False)
                yield

    def _find_threads(self, plan: CorePlan, *, is_quick: bool, limit_s: float | None = None) -> CorePlan:
        found = with_useful_threads(plan, self._runner, is_quick=is_quick, limit_s=limit_s)
        for key, core_set in zip(self._thread_keys(plan), (found.beside, found.alone), strict=True):
            if core_set.threads is not None:
                self._store.keep_threads(key, core_set.threads, is_quick=is_quick)
        return found

    def _thread_keys(self, plan: CorePlan) -> list[LatencyKey | None]:
        return [self._key("threads", core_set) for core_set in (plan.beside, plan.alone)]

    def _measure(self, core_set: CoreSet, limit_s: float) -> PassCost:
        with pinned(core_set):
            return measure_pass_cost(
                self._runner, clock=time.perf_counter, max_sequences=self._max_sequences, time_limit_s=limit_s
            )

    def _key(self, what: str, core_set: CoreSet) -> LatencyKey | None:
        if self._model is None:
            return None
        if (what, core_set) not in self._keys:
            dtype, device = self._runner.precision, str(self._runner.device)
            more = f"{self._more}, up to {self._max_sequences} sequences"
            key = LatencyKey.of(what, self._model, dtype=dtype, device=device, core_set=core_set, more=more)
            self._keys[what, core_set] = key
        return self._keys[what, core_set]
