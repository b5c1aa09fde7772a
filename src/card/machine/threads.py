"""Resources of passes: CPU cores, and threads, those of our own passes or torch's.

torch is loaded by models of others alone, so it is never imported here; where it is there, its threads are set too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from card.machine.container import num_usable_cores


class _Passes(threading.local):
    num_threads: int | None = None  # None: as many as torch, or all cores where it is not loaded


_passes = _Passes()


def use_threads(num_threads: int, *, in_integers: bool) -> None:
    """Give this thread's passes so many threads.

    Args:
        in_integers: the passes are integer ones. torch itself has one thread then: its others keep spinning for a
            millisecond after each of its operations, on the very cores that the next pass needs.
    """
    _set_torch_threads(1 if in_integers else num_threads)
    _passes.num_threads = num_threads if in_integers else 1


def _torch() -> Any:
    """Return torch if a model of others has loaded it, else None."""
    return sys.modules.get("torch")


def default_threads() -> int:
    """Return the threads that passes have by themselves: torch's, or one for each core."""
    torch = _torch()
    return num_usable_cores() if torch is None else int(torch.get_num_threads())


def _set_torch_threads(num_threads: int) -> None:
    torch = _torch()
    if torch is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def integer_passes_on(num_threads: int) -> Iterator[None]:
    """Give this thread's integer passes so many threads in the block; torch keeps its own, which others may need."""
    before, _passes.num_threads = _passes.num_threads, num_threads
    try:
        yield
    finally:
        _passes.num_threads = before


def integer_pass_threads() -> int:
    """Return how many threads an integer pass of this thread has."""
    return default_threads() if _passes.num_threads is None else _passes.num_threads


class ThreadsKept:
    """Puts back what was set when it was made."""

    def __init__(self) -> None:
        self._of_torch, self._of_passes = default_threads(), _passes.num_threads

    @property
    def num_threads(self) -> int:
        """Threads that passes had."""
        return self._of_torch if self._of_passes is None else max(self._of_torch, self._of_passes)

    def restore(self) -> None:
        """Put them back."""
        _set_torch_threads(self._of_torch)
        _passes.num_threads = self._of_passes


@dataclass(frozen=True, slots=True)
class CoreSet:
    """Place of a computation: cores (empty: not pinned) and threads (None: left as they are)."""

    cores: tuple[int, ...] = ()
    threads: int | None = None
    in_integers: bool = False  # the threads are those of integer passes


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Places of both sides; the target's threads are the most that it may have."""

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
    moves = cores_before is not None and cores_before != set(core_set.cores)
    try:
        if moves:
            os.sched_setaffinity(0, core_set.cores)
        use_threads(core_set.threads or before.num_threads, in_integers=core_set.in_integers)
        yield
    finally:
        before.restore()
        if moves and cores_before is not None:
            os.sched_setaffinity(0, cores_before)
