"""The threads of one decoder: they sleep between passes, in machine code, and one call wakes them for the next one.

An order is one number: a count that grows with each pass, and the threads that the pass has. The first 31 helpers are
woken only for passes that have them, those behind them together. A thread that wakes and is not among those of the
order looks at nothing else. The pass ends when all who are among them have said that they are
done. Only then do its tables and the words of the team change.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from card.kernels.jit.passes import run
from card.kernels.jit.sharing import PATIENCE
from card.kernels.jit.tables import PassTable
from card.kernels.jit.vectors import arrive, entered, let_others_run, load_int, look, pause, store_int
from card.kernels.jit.waking import NUM_CALLS, NUM_GROUPS, WAKE_SIZE, change_and_wake, prepare_wake, sleep_until_changed

_BARRIER_SIZE = 8  # integers that a counter has to itself, a line of the caches
# Places in the words of a team: the wake, whose word is the order; then the pass.
_TABLE = WAKE_SIZE
_CODE = WAKE_SIZE + 1
_DONE = WAKE_SIZE + _BARRIER_SIZE  # threads that are done with the pass, besides the first one
_BARRIER = _DONE + _BARRIER_SIZE
_TEAM_SIZE = _BARRIER + _BARRIER_SIZE
_MOST_THREADS = 1024  # in an order; the last number says that the team has ended
_END = _MOST_THREADS - 1
_PASS_CODE: int = run.address  # type: ignore[attr-defined]  # compiled with this module, as what follows


@entered
def prepare_team(team: int) -> None:
    """Make the words of a team ready."""
    prepare_wake(team)


@entered
def lead(code: int, team: int, table: PassTable) -> None:
    """Do a pass with the threads of a team, this one among them; ``code``: where `run` lies."""
    threads = table.num_threads
    store_int(team + 8 * _DONE, 0)
    store_int(team + 8 * _BARRIER, 0)
    if threads > 1:
        store_int(team + 8 * _TABLE, table)
        store_int(team + 8 * _CODE, code)
        number = look(team) // _MOST_THREADS + 1
        change_and_wake(team, _MOST_THREADS * number + threads, min(threads - 1, NUM_GROUPS))
    run(code, table, 0)
    looks = 0
    while look(team + 8 * _DONE) < threads - 1:
        looks += 1
        if looks > PATIENCE:
            let_others_run()
        else:
            pause()


@entered
def serve(team: int, thread: int) -> None:
    """Do a thread's part of each pass until the team ends."""
    seen = 0
    while seen % _MOST_THREADS != _END:
        seen = sleep_until_changed(team, seen, min(thread, NUM_GROUPS) - 1)
        if thread < seen % _MOST_THREADS and seen % _MOST_THREADS != _END:
            run(load_int(team + 8 * _CODE), load_int(team + 8 * _TABLE), thread)
            arrive(team + 8 * _DONE)


@entered
def end_team(team: int) -> None:
    """Let the threads of a team end."""
    change_and_wake(team, _MOST_THREADS * (look(team) // _MOST_THREADS + 1) + _END, NUM_GROUPS)


class ThreadTeam:
    """The threads of one decoder; they end with the process or the decoder."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * _TEAM_SIZE)()
        self._address = ctypes.addressof(self._words)
        self._num_helpers = 0  # that are known to run; an interrupt can leave one more
        self._indices = itertools.count(1)
        prepare_team(self._address)
        weakref.finalize(self, _end, self._words).atexit = False  # the process ends them, too

    @property
    def num_wakes(self) -> int:
        """Calls that woke the threads: one a pass, however many they are."""
        return self._words[NUM_CALLS]

    def run(self, table: Any) -> None:
        """Do the pass that a table describes, an array of `ctypes.c_int64` whose addresses stay valid meanwhile."""
        while self._num_helpers < table[PassTable.num_threads] - 1:
            threading.Thread(target=_serve, args=(self._words, self._indices), daemon=True).start()
            self._num_helpers += 1  # only once the thread runs: otherwise a pass would wait for it
        table[PassTable.barrier] = self._address + 8 * _BARRIER
        lead(_PASS_CODE, self._address, PassTable(ctypes.addressof(table)))


def _serve(words: Any, indices: Iterator[int]) -> None:
    """Hold the words of a team while a thread serves it, by an index of its own, however its start ended."""
    serve(ctypes.addressof(words), next(indices))


def _end(words: Any) -> None:
    """Let the threads of a team end."""
    end_team(ctypes.addressof(words))
