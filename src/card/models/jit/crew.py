"""Threads that do a pass together."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from card.models.jit.passes import run
from card.models.jit.tables import THREADS


class Crew:
    """The threads of one decoder; they sleep between passes and end with the process or the decoder."""

    def __init__(self) -> None:
        self._orders: list[SimpleQueue[Any]] = []

    def run(self, table: Any, barrier: Any) -> None:
        """Do the pass that a table describes, an int64 array whose addresses stay valid meanwhile.

        Args:
            barrier: the array of its counter, which the others may still look at when this returns.
        """
        num_threads = int(table[THREADS])
        while len(self._orders) < num_threads - 1:
            orders: SimpleQueue[Any] = SimpleQueue()
            self._orders.append(orders)
            threading.Thread(target=_work, args=(orders, len(self._orders)), daemon=True).start()
        for orders in self._orders[: num_threads - 1]:
            orders.put((table, barrier))
        run(table.ctypes.data, 0)

    def __del__(self) -> None:
        for orders in self._orders:
            orders.put(None)


def _work(orders: SimpleQueue[Any], thread: int) -> None:
    """Do one thread's part of each pass until there are no more."""
    while (order := orders.get()) is not None:
        table, _ = order
        run(table.ctypes.data, thread)
        del order, table
