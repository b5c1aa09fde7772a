"""The threads that compile grammars, each with a child process to try them in."""

from __future__ import annotations

import threading
from collections.abc import Callable

from card.errors import CapacityError
from card.text.fair_queue import FairQueue
from card.text.grammar_sandbox import SandboxHolder

# Four times the stack of a child, and the usual maximum: a grammar that passed there passes here.
_STACK_BYTES = 16 << 20
_stack_lock = threading.Lock()  # the size of stacks is the process's, until a thread is started

Job = Callable[[SandboxHolder], None]
"""Does a piece of work where grammars can be tried. Raises: nothing."""


class CompilerPool:
    """Runs the jobs of several clients in turn. Any thread may call it."""

    def __init__(self, num_threads: int) -> None:
        """Begin without a thread: each is started when there is work for it.

        Args:
            num_threads: one client never occupies all of them.
        """
        self._num_threads = num_threads
        self._queue: FairQueue[Job] = FairQueue(most_at_once=max(1, num_threads - 1))
        self._lock = threading.Lock()
        self._holders: list[SandboxHolder] = []

    @property
    def num_waiting(self) -> int:
        """Jobs that are not begun."""
        return len(self._queue)

    def submit(self, client: str, job: Job) -> None:
        """Have a job done. Raises: CapacityError after `close`, and if no thread can be started."""
        with self._lock:
            if self._queue.is_closed:
                raise CapacityError("the model is being closed and takes no more grammars")
            num_wanted = 1 + len(self._queue) + self._queue.num_running
            if len(self._holders) < min(num_wanted, self._num_threads):
                self._start_thread()
            self._queue.put(client, job)

    def _start_thread(self) -> None:
        holder = SandboxHolder()
        try:
            _start(self._queue, holder)
        except RuntimeError as error:
            if not self._holders:
                raise CapacityError("no thread can be started to compile the grammar in; ask again soon") from error
        else:
            self._holders.append(holder)

    def take_back(self, client: str, job: Job) -> bool:
        """Take back a job that is not begun; return whether there was one."""
        return self._queue.remove(client, job)

    def close(self) -> list[Job]:
        """End the children and their trials; return the jobs that were not begun. May be called twice."""
        with self._lock:
            left = self._queue.close()
            for holder in self._holders:
                holder.close()
            self._holders.clear()
        return left


def _start(queue: FairQueue[Job], holder: SandboxHolder) -> None:
    """Start a thread with room for deep grammars; it ends with the queue, and keeps no process from ending."""
    thread = threading.Thread(target=_serve, args=(queue, holder), name="card-grammar", daemon=True)
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def _serve(queue: FairQueue[Job], holder: SandboxHolder) -> None:
    while (turn := queue.take()) is not None:
        turn.item(holder)
        queue.done(turn)
        del turn  # a job holds on to its grammar
        holder.tidy()
