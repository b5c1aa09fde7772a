"""Notice when other processes use the cores: times measured then say little of the machine.

Linux reports how long each thread ran and waited for a core, and how long a hypervisor gave each core to other machines
("steal"). Our own child processes count as others: a drafter that loads takes a core too. Source:
Documentation/scheduler/sched-stats.rst and filesystems/proc.rst of Linux.

Evidence, two cores of an AMD EPYC, passes of two threads for 0.12 to 0.5 s: the thread that waited longest did so for
up to 0.02 of its time on a quiet machine, for 0.3 to 0.5 beside one busy process and 0.8 to 0.9 beside two. Involuntary
context switches (17 a second, and 17) and the share of processor time (1.7 of 2, and 1.5) do not tell them apart; nor,
in so short a time, do the system's busy ticks (off by up to 0.18 of a core).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from card.machine.container import SYSTEM
from card.machine.threads import usable_cores

_MOST_WAITED = 0.1  # share of a busy thread's time in which it waited for a core, up to which a moment is quiet
_SLICE_S = 0.004  # allowed in addition: one time slice of another thread, which is a large share of a short moment
_BUSY_SHARE = 0.25  # of the busiest thread's time, from which on a thread counts: passes wait for such a one
_MOST_STOLEN = 0.1  # share of this process's run time that the hypervisor may have taken


@dataclass(frozen=True, slots=True)
class _ThreadTimes:
    ran_s: float = 0.0
    waited_s: float = 0.0  # ready to run, for a core

    @property
    def wanted_s(self) -> float:
        return self.ran_s + self.waited_s


class CoreWatch:
    """Watches, from when it is made, whether this process has the cores that its threads want."""

    def __init__(self, root: Path = SYSTEM) -> None:
        self._root = root
        self._threads_before, self._stolen_before_s = _thread_times(root), _stolen_s(root)

    def was_quiet(self) -> bool | None:
        """Return whether the busy threads had their cores up to now; None where the system does not tell."""
        spent = [
            _ThreadTimes(max(0.0, now.ran_s - before.ran_s), max(0.0, now.waited_s - before.waited_s))
            for name, now in _thread_times(self._root).items()
            for before in [self._threads_before.get(name, _ThreadTimes())]
        ]
        ran_s = sum(thread.ran_s for thread in spent)
        if ran_s <= 0.0:
            return None
        least_s = _BUSY_SHARE * max(thread.wanted_s for thread in spent)
        busy = [thread for thread in spent if thread.wanted_s >= least_s]
        has_waited = any(thread.waited_s > _MOST_WAITED * thread.wanted_s + _SLICE_S for thread in busy)
        # One tick is the least that the system counts.
        stolen_s = _stolen_s(self._root) - self._stolen_before_s - _tick_s()
        return not has_waited and stolen_s <= _MOST_STOLEN * ran_s


def _thread_times(root: Path) -> Mapping[str, _ThreadTimes]:
    """Return the times of this process's threads by their names; none where the system does not tell."""
    times: dict[str, _ThreadTimes] = {}
    with contextlib.suppress(OSError):
        for folder in (root / "proc/self/task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # a thread may end meanwhile
                ran_ns, waited_ns, *_ = map(int, (folder / "schedstat").read_text("ascii").split())
                times[folder.name] = _ThreadTimes(ran_ns / 1e9, waited_ns / 1e9)
    return times


def _stolen_s(root: Path) -> float:
    """Return how long the hypervisor took the cores of this process; 0 where the system does not tell."""
    allowed = usable_cores()
    names = None if allowed is None else {f"cpu{core}" for core in allowed}
    ticks = 0
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/stat").read_text("ascii", errors="replace").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu" and (names is None or name in names) and len(fields) > 7:
                ticks += int(fields[7])
    return ticks * _tick_s()


def _tick_s() -> float:
    return 1.0 / os.sysconf("SC_CLK_TCK")
