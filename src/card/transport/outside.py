"""What links to drafters outside this process have in common: one ZeroMQ socket, watched and replaced when it fails."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod

import zmq

from card.errors import ProtocolError, WorkerError
from card.transport.link import DrafterLink, LinkStatus
from card.transport.watch import Watch
from card.tree.messages import DrafterMessage, Fault, Layer, Ping, Ready, Resync, TargetMessage, decode, encode

logger = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 0.02  # between looks at the drafter; a look is a system call


class OutsideLink(DrafterLink, ABC):
    """Talks to one drafter after the other, each under an incarnation of its own.

    The text never waits for a drafter: what cannot be sent now is dropped.
    """

    def __init__(self, watch: Watch) -> None:
        """Make a link without a drafter."""
        self._watch = watch
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._ready: Ready | None = None
        self._checked_at = 0.0
        self._is_awaited = False  # by `start`, whose caller is told of a failure
        self._is_closed = False

    @property
    def status(self) -> LinkStatus:
        """State of the present drafter, why it is not up, and how many were replaced."""
        return self._watch.status

    @property
    def ready(self) -> Ready | None:
        """What the newest drafter that came up said of itself."""
        return self._ready

    def begin(self) -> None:
        """Reach for the drafter; it is up once it was heard of."""
        if self._watch.incarnation == 0:
            self._checked_at = time.monotonic()
            self._open()

    def start(self) -> None:
        """Reach for the drafter and wait until it is ready. Raises: WorkerError if it fails or takes too long."""
        self._is_awaited = True
        self.begin()
        while self._watch.state == "starting":
            self.wait(0.05)
            self._read()
            self._supervise(time.monotonic())
        if self._watch.state != "up":
            reason = self._watch.reason
            self.close()
            raise WorkerError(self._not_started(reason))

    def send(self, message: TargetMessage) -> None:
        """Send the message unless the drafter is not up or the queue is full."""
        if self._watch.is_listening:
            self._say(message)

    def receive(self) -> list[DrafterMessage]:
        """Return what has arrived, and look after the drafter now and then; nothing after `close`."""
        if self._is_closed:
            return []
        messages = self._read()
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_INTERVAL_S:
            self._checked_at = now
            self._supervise(now)
        return messages

    def wait(self, timeout_s: float) -> None:
        """Wait for the next frame of the drafter."""
        if self._socket is not None:
            self._socket.poll(max(1, round(timeout_s * 1e3)))
        else:
            time.sleep(timeout_s)

    def reject(self, reason: str) -> None:
        """Leave a drafter that sends nonsense; the next one is tried later."""
        self._fail(reason)

    def close(self) -> None:
        """End the drafter's work for this link. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._farewell()
        self._context.term()
        self._watch.end()

    # ---- for links to fill in ---------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> None:
        """Begin the next incarnation: `Watch.begin`, and a socket."""

    @abstractmethod
    def _drop(self) -> None:
        """Leave the present incarnation, whatever its state."""

    @abstractmethod
    def _farewell(self) -> None:
        """Leave the drafter politely, for good."""

    @abstractmethod
    def _is_lost(self, now: float) -> bool:
        """Look at what the link alone can see of its drafter; a lost one has been given up when this returns."""

    @abstractmethod
    def _not_started(self, reason: str) -> str:
        """Return what is raised if the first drafter does not come up."""

    @abstractmethod
    def _lost(self, reason: str, *, is_first: bool) -> str:
        """Return what is logged of a drafter that was given up; ``is_first``: none has come up so far."""

    def _mismatch(self, ready: Ready) -> str:
        """Return why the drafter cannot draft for this target; empty if it can."""
        del ready
        return ""

    def _complaint(self, now: float) -> str:
        """Return what is wrong with a drafter that does not speak."""
        return self._watch.complaint(now)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _say(self, message: TargetMessage) -> None:
        if self._socket is not None:
            try:
                self._socket.send(encode(message, self._watch.incarnation), zmq.NOBLOCK)
            except zmq.Again:
                logger.debug("the drafter's queue is full: %s dropped", type(message).__name__)

    def _read(self) -> list[DrafterMessage]:
        """Return the frames that are here; a bad one ends the incarnation."""
        messages: list[DrafterMessage] = []
        while self._socket is not None:
            try:
                incarnation, message = decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            except ProtocolError as error:
                self._fail(str(error))
                break
            if incarnation != self._watch.incarnation:
                continue
            if isinstance(message, Fault):
                self._fail(message.reason)
                break
            if isinstance(message, Ready):
                if mismatch := self._mismatch(message):
                    self._fail(mismatch)
                    break
                self._ready = message
            elif self._watch.state == "starting":
                continue
            self._watch.hear(time.monotonic())
            if isinstance(message, Ready | Layer | Resync):
                messages.append(message)
        return messages

    def _supervise(self, now: float) -> None:
        """Notice a drafter that is lost, and start the next one when its back-off is over."""
        if self._is_lost(now):
            return
        match self._watch.advise(now):
            case "start":
                self._open()
            case "ping":
                self._say(Ping(self._watch.incarnation))
            case "give up":
                self._fail(self._complaint(now))

    def _fail(self, reason: str) -> None:
        """Give this drafter up and plan the next one."""
        is_first = self._watch.incarnation == 1 and self._ready is None and not self._is_awaited
        logger.log(logging.ERROR if is_first else logging.WARNING, "%s", self._lost(reason, is_first=is_first))
        self._drop()
        self._watch.fail(time.monotonic(), reason)
