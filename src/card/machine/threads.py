"""Resources of passes: CPU cores, and threads, torch's own or those of integer passes.

Torch's threads are set and put back only where something has loaded torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from card.machine.loaded import loaded_torch
from card.machine.sysctl import system_number

_TOPOLOGY = Path("/sys/devices/system/cpu")


class _Passes(threading.local):
    num_threads: int | None = None  # None: as many as torch
    of_torch: int | None = None  # what torch was to have, where nothing has loaded it


_passes = _Passes()


def use_threads(num_threads: int, *, in_integers: bool) -> None:
    """Give this thread's passes so many threads.

    Args:
        in_integers: the passes are integer ones. torch itself has one thread then: its others keep spinning for a
            millisecond after each of its operations, on the very cores that the next pass needs.
    """
    wanted = 1 if in_integers else num_threads
    _give_torch(wanted)
    _passes.num_threads = num_threads if in_integers else 1


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
    return _threads_of_torch() if _passes.num_threads is None else _passes.num_threads


def default_threads(topology: Path = _TOPOLOGY) -> int:
    """Return how many threads a pass has if nothing was set: one for each physical core that this process may use.

    On Linux it is the number that torch takes on x86, whose MKL reads two variables: a second thread on a core has no
    multipliers of its own.
    """
    cores = usable_cores()
    most = _untold_cores() if cores is None else len({_siblings(topology, core) for core in cores})
    for variable in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        first = os.environ.get(variable, "").partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return min(int(first), most)
    return most


def _untold_cores() -> int:
    """Return the physical cores of a machine that does not say which this process may use; of a Mac the fast ones.

    The slow ones would hold up the others at each layer.
    """
    return system_number("hw.perflevel0.physicalcpu") or system_number("hw.physicalcpu") or os.cpu_count() or 1


def _siblings(topology: Path, core: int) -> str:
    """Return the threads of a physical core; a system that does not tell has one on each."""
    try:
        return (topology / f"cpu{core}/topology/thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return str(core)


def _threads_of_torch() -> int:
    torch = loaded_torch()
    if torch is None:
        return default_threads() if _passes.of_torch is None else _passes.of_torch
    number: int = torch.get_num_threads()
    return number


def _give_torch(num_threads: int) -> None:
    torch = loaded_torch()
    if torch is None:
        _passes.of_torch = num_threads
    elif torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


class ThreadsKept:
    """Puts back what was set when it was made."""

    def __init__(self) -> None:
        self._of_torch, self._of_passes = _threads_of_torch(), _passes.num_threads

    @property
    def num_threads(self) -> int:
        """Threads that passes had."""
        return self._of_torch if self._of_passes is None else max(self._of_torch, self._of_passes)

    def restore(self) -> None:
        """Put them back."""
        _give_torch(self._of_torch)
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
