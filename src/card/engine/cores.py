"""Which CPU cores the target and the drafter run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from card.config import EngineSettings
from card.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Home:
    """Where a computation runs: cores (empty: not pinned) and torch threads (None: left as they are)."""

    cores: tuple[int, ...] = ()
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Where each side runs; the target's threads are the most that it may have."""

    beside: Home  # the target while a drafter in another process runs beside it
    alone: Home  # the target while it has all cores, or takes turns on them with a drafter in its own process
    draft: tuple[int, ...]  # cores of the drafter's process


def plan_cores(settings: EngineSettings, *, own_drafter_core: bool) -> CorePlan:
    """Share out the cores that this process may use: the last ones go to the drafter, if it has a process of its own.

    The target may have as many threads as cores, unless the settings say how many.
    Raises: SettingsError if a core is asked for that this process may not use.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux: the scheduler decides
        home = Home((), settings.threads)
        return CorePlan(home, home, ())
    allowed = sorted(os.sched_getaffinity(0))
    for name, cores in (("cores", settings.cores), ("draft_cores", settings.draft_cores)):
        for core in cores or ():
            if core not in allowed:
                raise SettingsError(f"{name} must be among the cores of this process {allowed}, got {core}")
    all_cores = settings.cores or tuple(allowed)
    alone = Home(settings.cores or (), settings.threads or len(all_cores))
    if not own_drafter_core:
        return CorePlan(alone, alone, ())
    count = settings.draft_threads
    free = [core for core in allowed if core not in (settings.cores or ())]
    draft = settings.draft_cores or (tuple(free[-count:]) if len(allowed) > count else ())
    target = settings.cores or tuple(core for core in allowed if core not in draft)
    return CorePlan(Home(target, settings.threads or len(target)), alone, draft)


@contextlib.contextmanager
def pinned(home: Home) -> Iterator[None]:
    """Run the block with the calling thread on these cores and threads; afterwards all is as before."""
    threads_before = torch.get_num_threads()
    cores_before = os.sched_getaffinity(0) if home.cores else None
    threads = home.threads or threads_before
    try:
        if home.cores:
            os.sched_setaffinity(0, home.cores)
        if threads_before != threads:
            torch.set_num_threads(threads)
        yield
    finally:
        if threads_before != threads:
            torch.set_num_threads(threads_before)
        if cores_before is not None:
            os.sched_setaffinity(0, cores_before)
