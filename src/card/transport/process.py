"""A drafter in a process of its own on this host, over ZeroMQ, watched and replaced when it fails."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from card.errors import ProtocolError, WorkerError
from card.transport.child import DrafterChild
from card.transport.drafter_process import FOLDER_PREFIX, DrafterConfig
from card.transport.link import LinkStatus
from card.transport.watch import Watch
from card.tree.messages import (
    DrafterMessage,
    Fault,
    Layer,
    Ping,
    Ready,
    Resync,
    Shutdown,
    TargetMessage,
    decode,
    encode,
)

logger = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 0.02  # between looks at the child; a look is a system call
_EXIT_TIMEOUT_S = 2.0
_LAST_WORDS_S = 0.05  # time for the frame in which a child that failed says why
_FAULT_STATUS = 1  # exit status of such a child
_LOOK_AT_STATE_S = 0.25  # between looks at whether the child is stopped; a look reads a file


class ProcessLink:
    """Starts the drafter's process, talks to it, and replaces it when it dies, hangs or talks nonsense.

    ``template`` gives the child's settings; address, incarnation and parent are filled in here.
    """

    runs_by_itself = True

    def __init__(
        self,
        template: DrafterConfig,
        *,
        start_timeout_s: float,
        silence_timeout_s: float,
        spare: DrafterChild | None = None,
    ) -> None:
        """Make a link without a child. The first child is ``spare``, if that was started for as many threads."""
        self._template = template
        self._spare = spare
        self._silence_timeout_s = silence_timeout_s
        self._watch = Watch(start_timeout_s=start_timeout_s, silence_timeout_s=silence_timeout_s)
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # readable by this user only
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._ready: Ready | None = None
        self._checked_at = 0.0
        self._looked_at = 0.0
        self._stopped_since: float | None = None
        self._is_awaited = False  # by `start`, whose caller is told of a failure
        self._is_closed = False

    @property
    def status(self) -> LinkStatus:
        """State of the current child, why it is not up, and how many were replaced; a stopped child is down."""
        status = self._watch.status
        if status.state == "down" or not self._is_stopped(time.monotonic()):
            return status
        return LinkStatus("down", "its process is stopped", status.num_restarts)

    @property
    def ready(self) -> Ready | None:
        """What the newest child that came up said of itself."""
        return self._ready

    @property
    def pid(self) -> int | None:
        """Process id of the current child."""
        return self._child.pid if self._child else None

    def begin(self) -> None:
        """Start the child; it is up once it was heard of."""
        if self._watch.incarnation == 0:
            self._spawn()

    def start(self) -> None:
        """Start the child and wait until it is ready. Raises: WorkerError if it fails or takes too long."""
        self._is_awaited = True
        self.begin()
        while self._watch.state == "starting":
            self.wait(0.05)
            self._read()
            self._supervise(time.monotonic())
        if self._watch.state != "up":
            reason = self._watch.reason
            self.close()
            raise WorkerError(f"drafter could not be started: {reason}")

    def send(self, message: TargetMessage) -> None:
        """Send the message unless the child is not up or its queue is full."""
        if self._watch.is_listening and self._socket is not None:
            try:
                self._socket.send(encode(message, self._watch.incarnation), zmq.NOBLOCK)
            except zmq.Again:
                logger.debug("drafter's queue is full: %s dropped", type(message).__name__)

    def receive(self) -> list[DrafterMessage]:
        """Return what has arrived, and look after the child now and then; nothing after `close`."""
        if self._is_closed:
            return []
        messages = self._read()
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_INTERVAL_S:
            self._checked_at = now
            self._supervise(now)
        return messages

    def wait(self, timeout_s: float) -> None:
        """Wait for the next frame of the child."""
        if self._socket is not None:
            self._socket.poll(max(1, round(timeout_s * 1e3)))
        else:
            time.sleep(timeout_s)

    def draft(self, num_passes: int) -> None:
        """Ignored: the child runs by itself."""

    def reject(self, reason: str) -> None:
        """Replace a child that sends nonsense."""
        self._fail(reason)

    def close(self) -> None:
        """End the child, politely first, and remove the socket's folder."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._child and self._child.poll() is None and self._watch.is_listening:
            self.send(Shutdown())
            try:
                self._child.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.info("drafter did not end in %g s and is killed", _EXIT_TIMEOUT_S)
        self._drop_child()
        if self._spare is not None:
            self._spare.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._watch.end()

    def _read(self) -> list[DrafterMessage]:
        """Return the frames that are here; a bad one ends the child."""
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
            self._watch.hear(time.monotonic())
            if isinstance(message, Ready):
                self._ready = message
            if isinstance(message, Ready | Layer | Resync):
                messages.append(message)
        return messages

    def _supervise(self, now: float) -> None:
        """Notice a child that died or hangs, and start the next one when its back-off is over."""
        if self._has_ended():
            return
        if self._is_stopped(now) and self._stopped_since and now - self._stopped_since > self._silence_timeout_s:
            self._fail(f"its process was stopped for {self._silence_timeout_s:g} s")
            return
        match self._watch.advise(now):
            case "start":
                self._spawn()
            case "ping":
                self.send(Ping(self._watch.incarnation))
            case "give up":
                self._fail(self._watch.complaint(now))

    def _has_ended(self) -> bool:
        """Notice a child that ended; what it said last tells more than its exit status."""
        if self._child is None or self._child.poll() is None:
            return False
        status = self._child.returncode
        if status == _FAULT_STATUS and self._socket is not None and self._socket.poll(round(_LAST_WORDS_S * 1e3)):
            self._read()
        if self._watch.state != "down":
            self._fail(f"it ended with exit status {status}")
        return True

    def _spawn(self) -> None:
        self._watch.begin(time.monotonic())
        address = f"ipc://{self._folder}/{self._watch.incarnation}"
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
            self._child = self._popen(address)
        except zmq.ZMQError as error:
            self._fail(f"no socket at {address} (errno {error.errno}); set TMPDIR to a short path that can be written")
        except OSError as error:
            self._fail(f"no process: {error.strerror}")

    def _popen(self, address: str) -> subprocess.Popen[bytes]:
        config = msgspec.structs.replace(
            self._template, address=address, incarnation=self._watch.incarnation, parent_pid=os.getpid()
        )
        spare, self._spare = self._spare, None
        child = spare.take(config.threads) if spare is not None else None
        if child is None:
            child = DrafterChild(config.threads).take(config.threads)
        if child is None:
            raise OSError(0, "it ended at once")
        with contextlib.suppress(OSError):  # at once: loading must not take time from the target's core
            if config.cores:
                os.sched_setaffinity(child.pid, config.cores)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:  # a child that ended already is noticed as one
            child.stdin.write(msgspec.json.encode(config))
        return child

    def _fail(self, reason: str) -> None:
        """End this child and plan the next one."""
        if self._watch.incarnation == 1 and self._ready is None and not self._is_awaited:
            logger.error("the drafter could not be started: %s; it is tried again while decoding goes on", reason)
        else:
            logger.warning("drafter %d is replaced: %s", self._watch.incarnation, reason)
        self._drop_child()
        self._watch.fail(time.monotonic(), reason)

    def _drop_child(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        self._stopped_since = None

    def _is_stopped(self, now: float) -> bool:
        """Return whether the child is stopped (SIGSTOP, a debugger), as of at most a moment ago."""
        if now - self._looked_at >= _LOOK_AT_STATE_S:
            self._looked_at = now
            is_stopped = self._child is not None and _process_state(self._child.pid) in ("T", "t")
            self._stopped_since = (self._stopped_since or now) if is_stopped else None
        return self._stopped_since is not None


def _process_state(pid: int) -> str:
    """Return the letter of a process's state as in `ps`; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
