"""Which CPU cores the target and the drafter run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from card.config import EngineSettings
from card.errors import SettingsError
from card.models.threads import ThreadsKept, use_threads


@dataclass(frozen=True, slots=True)
class CoreSet:
    """Where a computation runs: cores (empty: not pinned) and threads (None: left as they are)."""

    cores: tuple[int, ...] = ()
    threads: int | None = None
    in_integers: bool = False  # the threads are those of integer passes


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Where each side runs; the target's threads are the most that it may have."""

    beside: CoreSet  # the target while a drafter in another process runs beside it
    alone: CoreSet  # the target while it has all cores, or takes turns on them with a drafter in its own process
    draft: tuple[int, ...]  # cores of the drafter's process


def usable_cores() -> tuple[int, ...] | None:
    """Return the cores that this process may use; None where the system does not tell (not Linux)."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def plan_cores(
    settings: EngineSettings, allowed: Sequence[int] | None, *, own_drafter_core: bool, in_integers: bool = False
) -> CorePlan:
    """Share out the cores that this process may use: the last ones go to the drafter, if it has a process of its own.

    The target may have as many threads as cores, unless the settings say how many.

    Args:
        allowed: those cores; None: the scheduler decides, and nothing is shared out.
        in_integers: the target's passes are integer ones.
    Raises: SettingsError if a core is asked for that this process may not use.
    """
    if allowed is None:
        core_set = CoreSet((), settings.threads, in_integers)
        return CorePlan(core_set, core_set, ())
    for name, cores in (("cores", settings.cores), ("draft_cores", settings.draft_cores)):
        for core in cores or ():
            if core not in allowed:
                raise SettingsError(f"{name} must be among the cores of this process {list(allowed)}, got {core}")
    all_cores = settings.cores or tuple(allowed)
    alone = CoreSet(settings.cores or (), settings.threads or len(all_cores), in_integers)
    if not own_drafter_core:
        return CorePlan(alone, alone, ())
    count = settings.draft_threads
    free = [core for core in allowed if core not in (settings.cores or ())]
    draft = settings.draft_cores or (tuple(free[-count:]) if len(allowed) > count else ())
    target = settings.cores or tuple(core for core in allowed if core not in draft)
    return CorePlan(CoreSet(target, settings.threads or len(target), in_integers), alone, draft)


@contextlib.contextmanager
def pinned(core_set: CoreSet) -> Iterator[None]:
    """Run the block with the calling thread on these cores and threads; afterwards all is as before."""
    before = ThreadsKept()
    cores_before = os.sched_getaffinity(0) if core_set.cores else None
    try:
        if core_set.cores:
            os.sched_setaffinity(0, core_set.cores)
        use_threads(core_set.threads or before.num_threads, in_integers=core_set.in_integers)
        yield
    finally:
        before.restore()
        if cores_before is not None:
            os.sched_setaffinity(0, cores_before)
