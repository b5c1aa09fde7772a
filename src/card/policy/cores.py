"""Which CPU cores the target and the drafter run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

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
