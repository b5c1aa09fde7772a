"""The drafter as seen from an engine's step: messages go out and come in, and nothing is ever waited for."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from card.machine.threads import integer_passes_on
from card.transport.here import InlineLink
from card.transport.link import DrafterLink, LinkStatus
from card.tree.messages import DrafterMessage, TargetMessage

logger = logging.getLogger(__name__)
_TICK_S = 0.001  # between looks at what the drafter has sent, while requests run
_IDLE_TICK_S = 0.05
_IDLE_TICKS = 2000  # without a message to send, after which nothing seems to run
_MAX_WAITING = 8192  # messages either way; older ones are lost, which the protocol bears
_CLOSE_TIMEOUT_S = 5.0


class DrafterLine(Protocol):
    """Messages to and from a drafter; no method but `draft` takes longer than putting them into a queue."""

    takes_turns: bool
    """Whether the drafter works inside `draft` only, while the engine waits."""

    def post(self, messages: Sequence[TargetMessage]) -> None:
        """Send these when possible, or lose them."""

    def take(self) -> list[DrafterMessage]:
        """Return what has arrived since the last call."""

    def draft(self) -> None:
        """Have a drafter that takes turns make one pass."""

    def reject(self, reason: str) -> None:
        """Tell that the drafter sent something impossible."""

    @property
    def status(self) -> LinkStatus:
        """How the drafter was doing a moment ago."""

    def close(self) -> None:
        """End the drafter. May be called twice."""


class ThreadedLine:
    """A link that a thread of its own looks after: to replace a dead drafter takes time that no step must pay.

    The thread shares nothing with the steps but two queues, so that there is no lock to wait for.
    """

    takes_turns = False

    def __init__(self, link: DrafterLink, cores: Sequence[int] = ()) -> None:
        """Make a line that is not open yet.

        Args:
            cores: where the thread runs, best the drafter's: those of the target are busy. Empty: anywhere.
        """
        self._link = link
        self._cores = tuple(cores)
        self._out: deque[TargetMessage] = deque(maxlen=_MAX_WAITING)
        self._in: deque[DrafterMessage] = deque(maxlen=_MAX_WAITING)
        self._rejected: deque[str] = deque(maxlen=1)
        self._wake = threading.Event()
        self._is_closed = False
        self._status = LinkStatus("starting")
        self._thread = threading.Thread(target=self._run, name="card-drafter", daemon=True)

    def open(self, *, waits: bool) -> None:
        """Bring the drafter up.

        Args:
            waits: until it is ready; else it joins later, and is tried again if it fails.
        Raises: WorkerError if it is waited for and fails or takes too long.
        """
        if waits:
            self._link.start()
        else:
            self._link.begin()
        self._status = self._link.status
        self._thread.start()  # from here on nobody else touches the link

    @property
    def status(self) -> LinkStatus:
        """How the drafter was doing when the thread last looked."""
        return self._status

    def post(self, messages: Sequence[TargetMessage]) -> None:
        """Put the messages into the queue of the thread."""
        if messages:
            self._out.extend(messages)
            self._wake.set()

    def take(self) -> list[DrafterMessage]:
        """Empty the queue of what has arrived."""
        arrived: list[DrafterMessage] = []
        with contextlib.suppress(IndexError):  # the thread may put something in meanwhile: that comes next time
            for _ in range(_MAX_WAITING):
                arrived.append(self._in.popleft())
        return arrived

    def draft(self) -> None:
        """Nothing to do: the drafter never stops."""

    def reject(self, reason: str) -> None:
        """Have the thread replace the drafter."""
        self._rejected.append(reason)
        self._wake.set()

    def close(self) -> None:
        """End thread and drafter."""
        self._is_closed = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        if self._cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cores)  # of this thread alone
        num_idle = 0
        try:
            while not self._is_closed:
                self._wake.wait(_TICK_S if num_idle < _IDLE_TICKS else _IDLE_TICK_S)
                self._wake.clear()
                num_idle = 0 if self._out else num_idle + 1
                self._exchange()
        except Exception as error:  # it is the end of speculation, not of the engine that decodes in this process
            logger.error("the thread of the drafter failed with %s; decoding goes on without it", type(error).__name__)
            self._status = LinkStatus("down", "its thread failed")
        finally:
            self._link.close()

    def _exchange(self) -> None:
        while self._rejected:
            self._link.reject(self._rejected.popleft())
        while self._out:
            self._link.send(self._out.popleft())
        self._in.extend(self._link.receive())
        self._status = self._link.status


class TurnsLine:
    """A drafter in the engine's own thread, which waits while it drafts; each has all the time the other leaves."""

    takes_turns = True

    def __init__(self, link: InlineLink, num_threads: int = 1) -> None:
        """Make a line to a drafter that is up.

        Args:
            num_threads: of its integer passes. Others have the engine's, which may have bound them to its cores.
        """
        self._link = link
        self._num_threads = num_threads

    def post(self, messages: Sequence[TargetMessage]) -> None:
        """Tell the drafter at once."""
        for message in messages:
            self._link.send(message)

    def take(self) -> list[DrafterMessage]:
        """Return what it has said since the last call."""
        return self._link.receive()

    def draft(self) -> None:
        """Have it make one pass."""
        with integer_passes_on(self._num_threads):
            self._link.draft(1)

    def reject(self, reason: str) -> None:
        """Listen to it no more."""
        self._link.reject(reason)

    @property
    def status(self) -> LinkStatus:
        """Up until it fails or is rejected."""
        return self._link.status

    def close(self) -> None:
        """End the drafter."""
        self._link.close()
