"""A line now and then during long work, for readers of a pipe or a log."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import TracebackType

FIRST_S, EVERY_S = 10.0, 30.0  # shorter work writes no line


class Heartbeat:
    """Writes from a thread, while the block runs, what is being done and for how long."""

    def __init__(
        self,
        words: Callable[[], str],
        write: Callable[[str], None] | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            words: returns what is being done at the moment.
            write: takes the lines; None writes to standard error.
            wait: waits so many seconds and returns whether the block has ended; None waits in real time.
        """
        self._over = threading.Event()
        self._words, self._write, self._wait = words, write or write_line, wait or self._over.wait
        self._thread = threading.Thread(target=self.run, name="card-heartbeat", daemon=True)

    def run(self) -> None:
        """Tell until it is over."""
        seconds = FIRST_S
        is_over = self._wait(FIRST_S)
        while not is_over:
            self._write(f"{self._words()} ({seconds:.0f} s)")
            is_over = self._wait(EVERY_S)
            seconds += EVERY_S

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End it: nothing is written afterwards."""
        self._over.set()
        self._thread.join()


def write_line(words: str) -> None:
    """Write a line to standard error; a closed one is ignored."""
    with contextlib.suppress(OSError, ValueError):  # it is closed, or the disk is full: no reason to end
        if sys.stderr is not None:
            print(words, file=sys.stderr, flush=True)
