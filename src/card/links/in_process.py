"""Drafters in the target's process: in its thread, in turns with it, or free-running in another thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from card.drafting.drafter import DrafterWorker
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import DrafterMessage, Fault, Shutdown, TargetMessage, TargetStates
from card.errors import CardError, in_words
from card.links.link import DrafterLink, LinkStatus
from card.machine.lane import Lane
from card.machine.threads import integer_pass_threads, integer_passes_on

logger = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 10.0  # for a thread to end


class InlineLink(DrafterLink):
    """Runs the drafter only inside `draft`. If the worker raises, it stays down and the target goes on alone."""

    runs_by_itself = False

    def __init__(self, worker: DrafterWorker, integer_threads: int | None = None) -> None:
        """Use ``worker``; its integer passes use so many threads, None: those of the caller's thread."""
        super().__init__()
        self.layers_per_pass = worker.layers_per_pass
        self.worker = worker
        self._integer_threads = integer_threads
        self._received: list[DrafterMessage] = []

    def send(self, message: TargetMessage) -> None:
        """Pass the message to the worker at once."""
        self._run(lambda: self.worker.receive(message))

    def show(self, states: TargetStates) -> None:
        """Pass the states to the worker at once."""
        self._run(lambda: self.worker.receive(states))

    def receive(self) -> list[DrafterMessage]:
        """Return the worker's messages since the last call."""
        received, self._received = self._received, []
        return received

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        """Make drafter passes until the turn has ended for every request."""
        worker, passes = self.worker, list[tuple[int, float]]()
        worker.begin_turn(end)
        started = worker.clock()
        with integer_passes_on(self._integer_threads or integer_pass_threads()):
            while len(passes) < num_passes and self._status.state != "down":
                num_known = len(self._received)
                self._run(worker.step)
                if worker.is_idle:
                    break
                ended = worker.clock()
                passes.append((len(self._received) - num_known, ended - started))
                started = ended
        return passes

    def _run(self, act: Callable[[], list[DrafterMessage]]) -> None:
        if self._status.state == "down":
            return
        try:
            self._received += act()
        except (CardError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
            logger.warning("drafter ends: %s", error)
            self._status = LinkStatus("down", in_words(error))


class ThreadLink(DrafterLink):
    """Runs a drafter worker in a daemon thread. If it raises, it stays down and the target goes on alone."""

    def __init__(self, worker: DrafterWorker, lane: Lane | None = None) -> None:
        """Use ``worker``; its model computes in ``lane``, None: as in the caller's thread."""
        super().__init__()
        self.worker = worker
        self._lane = lane or Lane()
        self._to_drafter: queue.SimpleQueue[TargetMessage | TargetStates] = queue.SimpleQueue()
        self._to_target: queue.SimpleQueue[DrafterMessage] = queue.SimpleQueue()
        self._arrived = threading.Event()
        self._is_started = False
        self._thread = threading.Thread(target=self._run, name="card-drafter", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        if not self._is_started:
            self._is_started = True
            self._thread.start()

    def send(self, message: TargetMessage) -> None:
        """Queue the message if the thread still runs."""
        if self._thread.is_alive():
            self._to_drafter.put(message)

    def show(self, states: TargetStates) -> None:
        """Queue the states before the correction that needs them."""
        if self._thread.is_alive():
            self._to_drafter.put(states)

    def receive(self) -> list[DrafterMessage]:
        """Return the drafter's messages since the last call."""
        self._arrived.clear()
        received: list[DrafterMessage] = []
        while not self._to_target.empty():
            message = self._to_target.get()
            if isinstance(message, Fault):
                self._status = LinkStatus("down", message.reason)
            else:
                received.append(message)
        return received

    def wait(self, timeout_s: float) -> None:
        """Wait for the next message of the drafter."""
        self._arrived.wait(timeout_s)

    @property
    def status(self) -> LinkStatus:
        """State of the drafter: up until it is rejected or its thread ends."""
        if self._status.state == "up" and self._is_started and not self._thread.is_alive():
            return LinkStatus("down", "its thread has ended")
        return self._status

    def close(self) -> None:
        """End the thread and wait for it."""
        if self._thread.is_alive():
            self._to_drafter.put(Shutdown())
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with self._lane.entered():
                self._work()
        except (CardError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
            logger.warning("drafter thread ends: %s", error)
            self._deliver([Fault(in_words(error))])

    def _work(self) -> None:
        while not self.worker.is_shut_down:
            while not self._to_drafter.empty() or self.worker.is_idle:
                self._deliver(self.worker.receive(self._to_drafter.get()))
                if self.worker.is_shut_down:
                    return
            self._deliver(self.worker.step())

    def _deliver(self, messages: list[DrafterMessage]) -> None:
        for message in messages:
            self._to_target.put(message)
        if messages:
            self._arrived.set()
