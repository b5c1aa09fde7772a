"""The process in which something was made: a fork copies neither its threads nor its drafter."""

from __future__ import annotations

import os
from collections.abc import Callable

from card.errors import WorkerError

AT_HOME = (
    "an LLM belongs to the process that made it, and so do its answers; make one in each process that uses one, such "
    "as in the initializer of a pool"
)


class Home:
    """Tells whether this process is the one in which it was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a child that was forked since."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise WorkerError in a child: nothing there would ever answer."""
        if not self.is_here:
            raise WorkerError(AT_HOME)

    def closing(self, close: Callable[[], object]) -> Callable[[], None]:
        """Return a finalizer that does nothing in a child: what it would end belongs to the parent."""

        def close_here() -> None:
            if self.is_here:
                close()

        return close_here
