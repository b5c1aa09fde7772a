"""A line now and then while something long is done, for those who read it in a pipe or in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import TracebackType

FIRST_S, EVERY_S = 10.0, 30.0  # what is done sooner needs no words


class Pulse:
    """Tells from a thread of its own, while the block runs, what is being done and for how long."""

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
        self._thread = threading.Thread(target=self.run, name="card-pulse", daemon=True)

    def run(self) -> None:
        """Tell until it is over."""
        seconds = FIRST_S
        is_over = self._wait(FIRST_S)
        while not is_over:
            self._write(f"{self._words()} ({seconds:.0f} s)")
            is_over = self._wait(EVERY_S)
            seconds += EVERY_S

    def __enter__(self) -> Pulse:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End it: nothing is told afterwards."""
        self._over.set()
        self._thread.join()


def write_line(words: str) -> None:
    """Write a line to standard error, if there is anybody to read it."""
    with contextlib.suppress(OSError, ValueError):  # it is closed, or the disk is full: no reason to end
        if sys.stderr is not None:
            print(words, file=sys.stderr, flush=True)
