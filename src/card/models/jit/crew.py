"""Threads that do a pass together."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from card.models.jit.passes import run
from card.models.jit.tables import THREADS

_PAST_ALL = 1 << 40  # a counter that nobody waits for


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
            threading.Thread(target=_work, args=(orders, len(self._orders) + 1), daemon=True).start()
            self._orders.append(orders)  # not before: nobody would take what is put there if no thread can be started
        try:
            for orders in self._orders[: num_threads - 1]:
                orders.put((table, barrier))
            run(table.ctypes.data, 0)
        except BaseException:  # an interrupt before this thread's part: the others would wait for it for ever
            barrier[0] = _PAST_ALL
            self._wait_for_others()
            raise

    def _wait_for_others(self) -> None:
        """Return when the others have done what they were told."""
        for orders in self._orders:
            done = threading.Event()
            orders.put(done)
            done.wait()

    def __del__(self) -> None:
        for orders in self._orders:
            orders.put(None)


def _work(orders: SimpleQueue[Any], thread: int) -> None:
    """Do one thread's part of each pass until there are no more."""
    while (order := orders.get()) is not None:
        if isinstance(order, threading.Event):
            order.set()
            continue
        table, _ = order
        run(table.ctypes.data, thread)
        del order, table
