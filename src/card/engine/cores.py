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
class CorePlan:
    """Cores of each side; empty means not pinned."""

    target: tuple[int, ...]
    draft: tuple[int, ...]


def plan_cores(settings: EngineSettings, *, own_drafter_core: bool) -> CorePlan:
    """Share out the cores that this process may use: the last ones go to the drafter, if it has a process of its own.

    Raises: SettingsError if a core is asked for that this process may not use.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux: the scheduler decides
        return CorePlan((), ())
    allowed = sorted(os.sched_getaffinity(0))
    for name, cores in (("cores", settings.cores), ("draft_cores", settings.draft_cores)):
        for core in cores or ():
            if core not in allowed:
                raise SettingsError(f"{name} must be among the cores of this process {allowed}, got {core}")
    if not own_drafter_core:
        return CorePlan(settings.cores or (), ())
    count = settings.draft_threads
    free = [core for core in allowed if core not in (settings.cores or ())]
    draft = settings.draft_cores or (tuple(free[-count:]) if len(allowed) > count else ())
    target = settings.cores or tuple(core for core in allowed if core not in draft)
    return CorePlan(target, draft)


@contextlib.contextmanager
def pinned(cores: tuple[int, ...], num_threads: int) -> Iterator[None]:
    """Run the block with the calling thread on ``cores`` and torch on so many threads; afterwards all is as before."""
    threads_before = torch.get_num_threads()
    cores_before = os.sched_getaffinity(0) if cores else None
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        if threads_before != num_threads:
            torch.set_num_threads(num_threads)
        yield
    finally:
        if threads_before != num_threads:
            torch.set_num_threads(threads_before)
        if cores_before is not None:
            os.sched_setaffinity(0, cores_before)
