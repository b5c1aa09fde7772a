"""A link with its own thread: replacing a dead drafter takes time, which must not delay an engine's step.

The thread shares only queues with the steps, so there is no lock to wait for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence

from card.drafting.messages import DrafterMessage, TargetMessage
from card.links.link import DrafterLink, LinkStatus

logger = logging.getLogger(__name__)
_TICK_S = 0.001  # between looks at what the drafter has sent, while requests run
_IDLE_TICK_S = 0.05
_IDLE_TICKS = 2000  # ticks without a message to send before the engine counts as idle
_MAX_WAITING = 8192  # messages either way; older ones are dropped, which the protocol allows
_JOIN_TIMEOUT_S = 5.0  # for the thread to end


class BackgroundLink(DrafterLink):
    """Passes messages through queues to its thread, so that a call never waits."""

    def __init__(self, link: DrafterLink, cores: Sequence[int] = ()) -> None:
        """Wrap a link that is not open yet.

        Args:
            cores: where the thread runs, best the drafter's, as the target's are busy. Empty: anywhere.
        """
        self.link = link
        self._cores = tuple(cores)
        self._out: deque[TargetMessage] = deque(maxlen=_MAX_WAITING)
        self._in: deque[DrafterMessage] = deque(maxlen=_MAX_WAITING)
        self._rejected: deque[str] = deque(maxlen=1)
        self._wake = threading.Event()
        self._is_closed = False
        self._status = LinkStatus("starting")
        self._thread = threading.Thread(target=self._run, name="card-drafter", daemon=True)

    def begin(self) -> None:
        """Start the thread, which starts the drafter."""
        self.link.begin()
        self._hand_over()

    def start(self) -> None:
        """Start the drafter and the thread. Raises: WorkerError if the drafter fails or takes too long."""
        self.link.start()
        self._hand_over()

    def send(self, message: TargetMessage) -> None:
        """Queue the message for the thread."""
        self._out.append(message)
        self._wake.set()

    def receive(self) -> list[DrafterMessage]:
        """Return all messages that have arrived."""
        arrived: list[DrafterMessage] = []
        with contextlib.suppress(IndexError):  # messages that the thread adds meanwhile come next time
            for _ in range(_MAX_WAITING):
                arrived.append(self._in.popleft())
        return arrived

    def reject(self, reason: str) -> None:
        """Let the thread replace the drafter."""
        self._rejected.append(reason)
        self._wake.set()

    def close(self) -> None:
        """End thread and drafter."""
        self._is_closed = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _hand_over(self) -> None:
        """Pass the link to the thread; from now on no other thread uses it."""
        self._status = self.link.status
        self._thread.start()

    def _run(self) -> None:
        if self._cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cores)  # only of this thread
        num_idle = 0
        try:
            while not self._is_closed:
                self._wake.wait(_TICK_S if num_idle < _IDLE_TICKS else _IDLE_TICK_S)
                self._wake.clear()
                num_idle = 0 if self._out else num_idle + 1
                self._exchange()
        except Exception as error:  # speculation ends; the engine in this process goes on
            logger.error("the thread of the drafter failed with %s; decoding goes on without it", type(error).__name__)
            self._status = LinkStatus("down", "its thread failed")
        finally:
            self.link.close()

    def _exchange(self) -> None:
        while self._rejected:
            self.link.reject(self._rejected.popleft())
        while self._out:
            self.link.send(self._out.popleft())
        self._in.extend(self.link.receive())
        self._status = self.link.status
