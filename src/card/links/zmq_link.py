"""Base of the links to drafters outside this process: one ZeroMQ socket, watched and replaced when it fails."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import Literal

import zmq

from card.config import DrafterState
from card.drafting.messages import (
    MAX_REQUEST_BYTES,
    Correction,
    Declined,
    DrafterMessage,
    Fault,
    Layer,
    Open,
    Ping,
    Ready,
    Resync,
    TargetMessage,
    check_ready,
    decode,
    encode,
)
from card.errors import ProtocolError, WorkerError
from card.links.link import DrafterLink, LinkStatus

logger = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 0.02  # between checks of the drafter; each check is a system call
FIRST_BACKOFF_S = 0.25  # before a lost drafter is replaced; twice as long each time
MAX_BACKOFF_S = 30.0
PING_AFTER_S = 10.0  # of silence at the latest: a server drops clients that are silent for longer
STABLE_AFTER_S = 60.0  # a drafter that lived so long is replaced after the first back-off

_FRAMES_PER_READ = 4096  # layers of many requests, made during one long pass of the target
_BYTES_PER_READ = 32 * 1024 * 1024
_MOST_FLOODS = 3  # endless reads in a row until the drafter is given up

Advice = Literal["nothing", "start", "ping", "give up"]


class Watch:
    """Follows the successive drafters, each under its own incarnation. No I/O; the caller supplies the time.

    A drafter that is quiet for half the silence timeout is pinged. If it does not answer, it counts as degraded after
    half the timeout, and is given up after the whole. The back-off doubles with each failure.
    """

    def __init__(self, *, start_timeout_s: float, silence_timeout_s: float) -> None:
        self.incarnation = 0
        self.state: DrafterState = "down"
        self.reason = "not started"
        self._start_timeout_s = start_timeout_s
        self.silence_timeout_s = silence_timeout_s
        self._backoff_s = FIRST_BACKOFF_S
        self.begun_at = self.heard_at = 0.0
        self._pinged_at: float | None = None
        self._next_at: float | None = None

    @property
    def status(self) -> LinkStatus:
        """State of the present drafter, why it is not up, and the number of replacements."""
        return LinkStatus(self.state, self.reason, max(self.incarnation - 1, 0))

    @property
    def is_listening(self) -> bool:
        """True if messages can reach the drafter."""
        return self.state in ("up", "degraded")

    def begin(self, now: float) -> None:
        """Start the next incarnation."""
        self.incarnation += 1
        self.state, self.reason = "starting", ""
        self.begun_at = self.heard_at = now
        self._next_at = self._pinged_at = None

    def hear(self, now: float) -> None:
        """Note a sign of life."""
        self.heard_at, self._pinged_at = now, None
        self.state, self.reason = "up", ""

    def fail(self, now: float, reason: str, most_backoff_s: float) -> None:
        """Note that this drafter is lost; the next one is due after the back-off."""
        if now - self.begun_at > STABLE_AFTER_S:
            self._backoff_s = FIRST_BACKOFF_S
        self.state, self.reason = "down", reason
        self._next_at = now + min(self._backoff_s, most_backoff_s)
        self._backoff_s = min(2 * self._backoff_s, most_backoff_s)

    def forgive(self) -> None:
        """Let the next drafter start at once: the last one did not fail."""
        self._next_at, self._backoff_s = 0.0, FIRST_BACKOFF_S

    def end(self, reason: str = "closed") -> None:
        """Note that no drafter is wanted, for good or until `forgive`."""
        self.state, self.reason = "down", reason
        self._next_at = None

    def advise(self, now: float) -> Advice:
        """Return what to do now; after "give up", `complaint` gives the reason."""
        if self._next_at is not None:
            return "start" if now >= self._next_at else "nothing"
        if self.state == "starting":
            return "give up" if now - self.begun_at > self._start_timeout_s else "nothing"
        if not self.is_listening:
            return "nothing"
        if self._pinged_at is None:
            if now - self.heard_at <= min(self.silence_timeout_s / 2, PING_AFTER_S):
                return "nothing"
            self._pinged_at = now
            return "ping"
        if now - self._pinged_at > self.silence_timeout_s:
            return "give up"
        if now - self._pinged_at > self.silence_timeout_s / 2:
            self.state, self.reason = "degraded", self.complaint(now)
        return "nothing"

    def complaint(self, now: float) -> str:
        """Return what is wrong with a silent drafter."""
        if self.state == "starting":
            return f"not ready after {self._start_timeout_s:g} s"
        return f"silent for {now - self.heard_at:.1f} s"


class ZmqLink(DrafterLink, ABC):
    """Talks to successive drafters, each under its own incarnation.

    The text never waits for a drafter: messages that cannot be sent now are dropped.
    """

    def __init__(self, watch: Watch) -> None:
        """Make a link without a drafter."""
        self._watch = watch
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._ready: Ready | None = None
        self._refused: list[DrafterMessage] = []  # our own answers, for the drafter, to messages too long to be sent
        self._checked_at = 0.0
        self._is_awaited = False  # `start` is waiting, and raises a failure
        self._is_closed = False
        self._is_ready_invalid = False  # of the last `Ready`
        self._num_floods = 0  # endless reads in a row

    @property
    def status(self) -> LinkStatus:
        """State of the present drafter, why it is not up, and the number of replacements."""
        return self._watch.status

    @property
    def ready(self) -> Ready | None:
        """The `Ready` message of the newest drafter."""
        return self._ready

    def begin(self) -> None:
        """Begin to connect to the drafter; it is up once its first message came."""
        if self._watch.incarnation == 0:
            self._checked_at = time.monotonic()
            self._try_to_open()

    def start(self) -> None:
        """Connect to the drafter and wait until it is ready. After an invalid `Ready` it is down, without an error.

        Raises: WorkerError if it fails or takes too long.
        """
        self._is_awaited = True
        self.begin()
        while self._watch.state == "starting":
            self.wait(0.05)
            self._read()
            self._supervise(time.monotonic())
        if self._watch.state != "up" and not self._is_ready_invalid:
            reason = self._watch.reason
            self.close()
            raise WorkerError(self._not_started(reason))

    def send(self, message: TargetMessage) -> None:
        """Send the message unless the drafter is not up or the queue is full."""
        if self._watch.is_listening:
            self._say(message)

    def receive(self) -> list[DrafterMessage]:
        """Return the messages that have arrived; check the drafter now and then; nothing after `close`."""
        if self._is_closed:
            return []
        messages = self._refused + self._read()
        self._refused = []
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
        """Drop a drafter that sent an invalid message; the next one is tried later."""
        self._fail(reason)

    def close(self) -> None:
        """End the drafter's work for this link. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._farewell()
        self._context.term()
        self._watch.end()

    # ---- for subclasses ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> None:
        """Begin the next incarnation: `Watch.begin`, and a socket."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop the present incarnation in any state."""

    @abstractmethod
    def _farewell(self) -> None:
        """Say goodbye to the drafter, for good."""

    @abstractmethod
    def _is_lost(self, now: float) -> bool:
        """Check for losses that only this kind of link can see; give up a lost drafter before returning."""

    @abstractmethod
    def _not_started(self, reason: str) -> str:
        """Return the error message if the first drafter does not start."""

    @abstractmethod
    def _lost(self, reason: str, *, is_first: bool) -> str:
        """Return the log line about a lost drafter; ``is_first``: none was up so far."""

    def _mismatch(self, ready: Ready) -> str:
        """Return why the drafter cannot draft for this target; empty if it can."""
        del ready
        return ""

    def _complaint(self, now: float) -> str:
        """Return what is wrong with a silent drafter."""
        return self._watch.complaint(now)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _say(self, message: TargetMessage) -> None:
        if self._socket is not None:
            frame = encode(message, self._watch.incarnation)
            if len(frame) > MAX_REQUEST_BYTES and isinstance(message, Open | Correction):
                reason = f"its text and grammar take {len(frame)} bytes; a drafter accepts at most {MAX_REQUEST_BYTES}"
                self._refused.append(Declined(message.request_id, reason))
                return
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                logger.debug("the drafter's queue is full: a message is dropped")

    def _read(self) -> list[DrafterMessage]:
        """Return the messages that have arrived; a malformed one or a flood ends the incarnation."""
        messages: list[DrafterMessage] = []
        asked: set[int] = set()  # requests that the drafter asks for: one answer each is enough
        num_frames = num_bytes = 0
        while self._socket is not None:
            if num_frames >= _FRAMES_PER_READ or num_bytes >= _BYTES_PER_READ:
                self._num_floods += 1
                if self._num_floods >= _MOST_FLOODS:
                    self._fail("it sends more than can be read")
                return messages
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            num_frames, num_bytes = num_frames + 1, num_bytes + len(frame)
            message = self._understood(frame)
            if isinstance(message, Resync) and message.request_id in asked:
                continue
            if isinstance(message, Resync):
                asked.add(message.request_id)
            if isinstance(message, Ready | Layer | Resync | Declined):
                messages.append(message)
        self._num_floods = 0
        return messages

    def _understood(self, frame: bytes) -> DrafterMessage | TargetMessage | None:
        """Return the message in a frame; None if it carries nothing, or ends this drafter."""
        try:
            incarnation, message = decode(frame)
        except ProtocolError as error:
            self._fail(str(error))
            return None
        if incarnation != self._watch.incarnation:
            return None
        if isinstance(message, Fault):
            self._fail(message.reason)
            return None
        if isinstance(message, Ready):
            if fault := self._fault_of(message):
                self._fail(fault)
                return None
            self._ready = message
        elif self._watch.state == "starting":
            return None
        self._watch.hear(time.monotonic())
        return message

    def _fault_of(self, ready: Ready) -> str:
        """Return why a `Ready` makes a drafter unusable; empty if it does not."""
        try:
            check_ready(ready)
        except ProtocolError as error:
            self._is_ready_invalid = True
            return str(error)
        return self._mismatch(ready)

    def _supervise(self, now: float) -> None:
        """Notice a lost drafter, and start the next one after its back-off."""
        if self._is_lost(now):
            return
        match self._watch.advise(now):
            case "start":
                self._try_to_open()
            case "ping":
                self._say(Ping(self._watch.incarnation))
            case "give up":
                self._fail(self._complaint(now))

    def _try_to_open(self) -> None:
        """Try the next drafter; without free files or memory, again later."""
        try:
            self._open()
        except (zmq.ZMQError, OSError) as error:
            self._fail(f"no socket for it: {error.strerror}; let this process have more open files")

    def _fail(self, reason: str) -> None:
        """Give this drafter up and plan the next one."""
        is_first = self._watch.incarnation == 1 and self._ready is None and not self._is_awaited
        logger.log(logging.ERROR if is_first else logging.WARNING, "%s", self._lost(reason, is_first=is_first))
        self._drop()
        self._watch.fail(time.monotonic(), reason, MAX_BACKOFF_S)
