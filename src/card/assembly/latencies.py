"""Measured costs of passes: of an earlier start, of a drafter elsewhere, or of this start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from card.assembly.drafters import Drafter
from card.assembly.latency.measuring import Measuring
from card.assembly.latency.store import LatencyKey, LatencyStore, drafter_key
from card.assembly.plan import Plan
from card.config import EngineSettings, Schedule
from card.machine.folders import cache_folder
from card.machine.packages import installed_version
from card.machine.pass_cost import PassCost
from card.machine.threads import CorePlan, CoreSet
from card.models.by_transformers import torch_module
from card.models.runner import RowRunner


class MeasuredLatencies:
    """The latencies of one target and its drafter; those of a quiet moment are kept for the next start."""

    def __init__(self, plan: Plan, runner: RowRunner, *, is_target_named: bool, is_draft_named: bool) -> None:
        """Check what is kept; nothing else is measured yet.

        Args:
            plan: with all the placements that there may be.
            runner: of the target.
            is_target_named: the target was given by a name, under which its latencies are kept.
            is_draft_named: the same of the draft model.
        """
        settings = plan.settings
        self._settings = settings
        self._is_draft_named = is_draft_named and settings.draft is not None
        self._finds_threads = settings.threads is None and str(runner.device) == "cpu"
        self._drafter: Drafter | None = None
        self._in_turns: PassCost | None = None  # of a drafter in this process
        self._store = LatencyStore(cache_folder(settings.cache_dir) if settings.cache else None)
        self._process_key: LatencyKey | None = None  # of a drafter in a process of its own
        if self._is_draft_named and plan.has_drafter_process:
            core_set = CoreSet(plan.cores.draft, settings.draft_threads)
            self._process_key = drafter_key("drafter", settings, core_set)
        self._agreement_key: LatencyKey | None = None
        if self._is_draft_named and is_target_named:
            pair = f"of {settings.target} in {settings.dtype}"
            self._agreement_key = drafter_key("agreement", settings, CoreSet(), more=pair)
        self.waits_for_drafter = self._waits(plan)
        self._measuring = Measuring(
            runner,
            self._store,
            settings.target if is_target_named else None,
            max_sequences=min(8, settings.max_num_seqs),
            more=settings.target_cost or "",
        )
        self._measuring.forget_if_wrong(plan.cores)

    def with_useful_threads(self, cores: CorePlan) -> CorePlan:
        """Return the cores with all threads for the target, or fewer that are faster, unless they were set."""
        return replace(cores, beside=self._useful(cores.beside), alone=self._useful(cores.alone))

    def spare_cores(self, plan: Plan) -> int:
        """Return how many cores a plan gives to a drafter's process without slowing the target."""
        cores = replace(plan.cores, alone=self._useful(plan.cores.alone))
        return 0 if self._measuring.misses_cores(cores) else plan.settings.draft_threads

    def target(self, plan: Plan, schedule: Schedule) -> PassCost:
        """Return what the target's passes cost under a schedule."""
        return self._measuring.cost(plan.cores_of(schedule))

    def drafter(self, plan: Plan, schedule: Schedule) -> PassCost | None:
        """Return what the drafter's passes cost under a schedule; None if that is not known."""
        placement, drafter = plan.placements[schedule], self._drafter
        if drafter is None:
            return None
        if placement in ("process", "remote"):
            return drafter.reported() or (self._store.cost(self._process_key) if placement == "process" else None)
        if self._in_turns is None:
            key = drafter_key("draft in turns", self._settings, plan.cores.alone) if self._is_draft_named else None
            self._in_turns = self._measuring.remembered(key, lambda: drafter.measured(plan.cores.alone))
        return self._in_turns

    @property
    def knows_drafter(self) -> bool:
        """True if the pass times of a drafter in a process of its own are known."""
        return self._store.cost(self._process_key) is not None

    def ask(self, drafter: Drafter) -> None:
        """Read the pass times of this drafter from now on."""
        self._drafter = drafter

    def remember_drafter(self) -> None:
        """Keep the pass times that a drafter in a process of its own reported."""
        cost = self._drafter.reported() if self._drafter is not None else None
        if cost is not None:
            self._store.keep_cost(self._process_key, cost)

    @property
    def agreement(self) -> float | None:
        """Share of the draft model's tokens that were the target's in earlier starts; None if that is not known."""
        return self._store.agreement(self._agreement_key)

    def remember_agreement(self, agreement: float | None) -> None:
        """Keep such a share for the next start; None if too little was seen."""
        if agreement is not None:
            self._store.keep_agreement(self._agreement_key, agreement)

    def _useful(self, core_set: CoreSet) -> CoreSet:
        return self._measuring.with_useful_threads(core_set) if self._finds_threads else core_set

    def _waits(self, plan: Plan) -> bool:
        """Return whether the drafter must be up before the first token.

        Not under a tuned policy, which decodes plainly or in turns meanwhile. Even then an only drafter without known
        pass times is waited for: the policy could not weigh it.
        """
        settings = plan.settings
        if settings.wait_for_drafter is not None:
            return settings.wait_for_drafter
        if settings.draft_optional or plan.leases_drafter:
            return False
        if not plan.method.is_tuned or settings.policy == "fixed" or "remote" in plan.placements.values():
            return True
        return plan.placements == {"beside": "process"} and not self.knows_drafter


def check_once(runner: RowRunner, settings: EngineSettings, *, is_named: bool) -> None:
    """Compare a target that runs through transformers' modules with its own forward, unless an earlier start did.

    Args:
        is_named: the target was given by a name, under which it is remembered.
    Raises: ModelError if its logits differ.
    """
    if not settings.check or runner.has_own_pass:
        return
    store, key = LatencyStore(cache_folder(settings.cache_dir) if settings.cache else None), None
    if is_named:
        theirs = f"transformers {installed_version('transformers')}"
        more = f"{theirs}, {settings.target_cost or 'as it is'}, {runner.max_model_len}"
        where: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "core_set": CoreSet()}
        key = LatencyKey.of("check", settings.target, **where, more=more)
    if not store.was_checked(key):
        torch_module("transformers.row_check", "a model of transformers").check_rows(runner, settings.target)
        store.keep_check(key)
