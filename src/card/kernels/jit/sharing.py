"""Work of a pass, shared out among its threads, and their waiting for each other."""

from __future__ import annotations

from typing import NamedTuple

from card.kernels.jit.tables import PassTable
from card.kernels.jit.tiles import MOST_ROWS
from card.kernels.jit.vectors import arrive, compiled, let_others_run, look, pause

PATIENCE = 2000  # looks at the others before the core is given away
_MANY_ROWS = 2 * MOST_ROWS  # for each thread: from here on rows are shared out


class Work(NamedTuple):
    """Rows that threads share out, and which part of their channels is one thread's."""

    first_row: int
    num_rows: int
    part: int
    parts: int


@compiled
def wait(counter: int, num_threads: int, turn: int) -> int:
    """Wait until all threads have come so far, if there are several; return the next turn."""
    if num_threads == 1:
        return turn
    arrive(counter)
    looks = 0
    while look(counter) < num_threads * turn:
        looks += 1
        if looks > PATIENCE:
            let_others_run()
        else:
            pause()
    return turn + 1


@compiled
def share(count: int, thread: int, num_threads: int) -> int:
    """Return where the part of a thread starts; that of the next thread is where it stops."""
    return count * thread // num_threads


@compiled
def shares_rows(table: PassTable) -> int:
    """Return whether each thread has rows of its own."""
    return int(table.num_rows >= _MANY_ROWS * table.num_threads)


@compiled
def holder(table: PassTable, row: int) -> int:
    """Return the thread whose own row this is, where rows are shared out."""
    return ((row + 1) * table.num_threads - 1) // table.num_rows
