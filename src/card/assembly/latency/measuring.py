"""Measurements of the target when an engine starts, or those of an earlier start, checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from card.assembly.latency.store import LatencyKey, LatencyStore
from card.assembly.latency.threads import compare, is_contradicted, useful_threads
from card.assembly.latency.timing import measure_pass_cost, single_pass_takes
from card.machine.core_groups import core_groups
from card.machine.pass_cost import PassCost
from card.machine.quiet import CoreWatch
from card.machine.threads import CorePlan, CoreSet, pinned, usable_cores
from card.models.runner import RowRunner

MEASURING_S = 0.25  # for what the target's passes cost under one schedule
_CHECK_RUNS, _CHANGED_FACTOR = 3, 1.6  # passes; a machine whose speed drifts by a fifth is still the same


class Measuring:
    """Measures a target, and stores what was measured while no other process used the cores."""

    def __init__(
        self,
        runner: RowRunner,
        store: LatencyStore,
        model: str | None,
        *,
        max_sequences: int,
        more: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin.

        Args:
            model: name of the target; None for a loaded one, of which nothing is kept.
            max_sequences: most sequences in a measured pass.
            more: what else the latencies depend on, such as an inflated cost.
            clock: seconds; rises steadily.
        """
        self._runner = runner
        self._store = store
        self._model = model
        self._max_sequences = max_sequences
        self._more = more
        self._clock = clock
        # As the files were when they were loaded. Later they may be others, or cannot be looked at.
        self._keys: dict[tuple[str, CoreSet], LatencyKey | None] = {}
        self._costs: dict[CoreSet, PassCost] = {}  # of this start
        self._useful: dict[CoreSet, CoreSet] = {}

    def forget_if_wrong(self, plan: CorePlan) -> None:
        """Forget what a few passes of a quiet moment contradict.

        A pass time that differs from the kept one means that this machine has changed: all times are forgotten. A pass
        beside other work proves nothing.
        """
        known = self._store.cost(self._key("pass", self._kept_threads(plan.alone)))
        if known is not None and self._is_changed(known, self._kept_threads(plan.alone)):
            self._store.forget_times()
            return
        for core_set in dict.fromkeys((plan.beside, plan.alone)):
            stored = self._kept_threads(core_set)
            if stored != core_set and is_contradicted(self._runner, core_set, stored, clock=self._clock):
                self._store.forget(self._key("useful threads", core_set))
        if self._store.threads(key := self._spare_key(plan)):
            alone, beside = self._kept_threads(plan.alone), plan.beside
            if is_contradicted(self._runner, alone, beside, clock=self._clock):
                self._store.forget(key)

    def with_useful_threads(self, core_set: CoreSet) -> CoreSet:
        """Return the cores with all threads for the target, or as many as were found to be faster."""
        if core_set not in self._useful:
            self._useful[core_set] = self._threads_of(core_set)
        return self._useful[core_set]

    def misses_cores(self, plan: CorePlan) -> bool:
        """Return whether the target's passes are slower without the cores that the plan gives to a drafter."""
        most, left = plan.alone.threads or 1, plan.beside.threads or 1
        left = min(left, len(plan.beside.cores) or left)  # more threads than cores are no more than they are
        if plan.beside == plan.alone:
            return not plan.draft  # it is not known which cores they are
        if most <= left:
            return False  # it does not use them
        if left <= most // 2:
            return True  # so few threads are not faster, as `with_useful_threads` knows
        key = self._spare_key(plan)
        known = self._store.threads(key)
        if known is not None:
            return known == 0
        compared = compare(self._runner, plan.alone, plan.beside, clock=self._clock)
        if compared.was_quiet:
            self._store.keep_threads(key, most - left if compared.is_as_fast else 0)
        return not compared.is_as_fast

    def cost(self, core_set: CoreSet) -> PassCost:
        """Return what the target's passes cost on these cores."""
        if core_set not in self._costs:
            cost = self.remembered(self._key("pass", core_set), lambda: self._measure(core_set))
            assert cost is not None
            self._costs[core_set] = cost
        return self._costs[core_set]

    def remembered(self, key: LatencyKey | None, measure: Callable[[], PassCost | None]) -> PassCost | None:
        """Return the stored cost of passes, else measure it now and keep it if no other process used the cores.

        It is also kept where the system does not report that: the next start checks it anyway.
        """
        if (known := self._store.cost(key)) is not None:
            return known
        watch = CoreWatch()
        cost = measure()
        if cost is not None and watch.was_quiet() is not False:
            self._store.keep_cost(key, cost)
        return cost

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _is_changed(self, known: PassCost, core_set: CoreSet) -> bool:
        low_s, high_s = known.seconds(1) / _CHANGED_FACTOR, known.seconds(1) * _CHANGED_FACTOR
        watch = CoreWatch()
        with pinned(core_set):
            is_same = single_pass_takes(self._runner, low_s, high_s, clock=self._clock, num_runs=_CHECK_RUNS)
        return not is_same and watch.was_quiet() is not False

    def _threads_of(self, core_set: CoreSet) -> CoreSet:
        key = self._key("useful threads", core_set)
        if self._store.threads(key) is not None:
            return self._kept_threads(core_set)
        chosen = useful_threads(
            self._runner, core_set, clock=self._clock, groups=core_groups(core_set.cores or usable_cores())
        )
        if chosen.was_quiet and chosen.core_set.threads is not None:
            self._store.keep_threads(key, chosen.core_set.threads)
        return chosen.core_set

    def _kept_threads(self, core_set: CoreSet) -> CoreSet:
        """Return the cores with the number of threads that is kept, if there is one."""
        threads = self._store.threads(self._key("useful threads", core_set))
        return core_set if threads is None else replace(core_set, threads=threads)

    def _spare_key(self, plan: CorePlan) -> LatencyKey | None:
        return self._key(f"spare cores, {len(plan.draft)} of a drafter", plan.beside)

    def _measure(self, core_set: CoreSet) -> PassCost:
        with pinned(core_set):
            return measure_pass_cost(
                self._runner, clock=self._clock, max_sequences=self._max_sequences, time_limit_s=MEASURING_S
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
