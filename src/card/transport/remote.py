"""A drafter on a draft server, reached over TCP, watched and tried again when it is lost."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from card.errors import ProtocolError, WorkerError
from card.transport.keys import ClientKeys, check_address, load_client_keys
from card.transport.link import LinkStatus
from card.transport.watch import Watch
from card.tree.messages import (
    MAX_FRAME_BYTES,
    DrafterMessage,
    Fault,
    Hello,
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
_CHECK_INTERVAL_S = 0.02
_CONNECT_TIMEOUT_S = 3.0  # until the address must have taken a connection
_ANSWER_TIMEOUT_S = 15.0  # a server listens once its model is loaded, and then answers at once
_RESTING_AFTER_S = 5.0  # a link that is not looked at for so long belongs to a target without requests
_WAKING_S = 1.0  # after which what was said while the link was not looked at has arrived
_QUEUED_FRAMES = 256  # on the way out
_ARRIVED_FRAMES = 4096  # layers of many requests, made during one long pass of the target
_FAREWELL_MS = 200  # for the last message to leave
_RECONNECT_MS = (50, 1000)  # first and longest pause between attempts to reach the address
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES


class RemoteLink:
    """Talks to a draft server. A lost session is replaced by a new one, under a new incarnation, after a back-off.

    The text never waits for the network: what cannot be sent now is dropped.
    """

    runs_by_itself = True

    def __init__(
        self,
        address: str,
        *,
        vocab_size: int,
        tokenizer: str = "",
        keys: Path | None = None,
        start_timeout_s: float,
        silence_timeout_s: float,
    ) -> None:
        """Read the keys; nothing is sent yet.

        Args:
            address: tcp://host:port of the server.
            vocab_size: of the target.
            tokenizer: fingerprint of the target's; empty compares the vocabularies by their size alone.
            keys: folder with the client's keys; None for a server without.
        Raises: SettingsError for a malformed address, or keys that cannot be read.
        """
        self._address = check_address(address)
        self._keys: ClientKeys | None = load_client_keys(keys) if keys is not None else None
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._answer_timeout_s = min(start_timeout_s, _ANSWER_TIMEOUT_S)
        self._connect_timeout_s = min(start_timeout_s, _CONNECT_TIMEOUT_S)
        self._watch = Watch(start_timeout_s=self._answer_timeout_s, silence_timeout_s=silence_timeout_s)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._ready: Ready | None = None
        self._has_connected = False  # the address answered, whatever came after
        self._checked_at = 0.0
        self._woke_at = -math.inf
        self._is_awaited = False  # by `start`, whose caller is told of a failure
        self._is_closed = False

    @property
    def status(self) -> LinkStatus:
        """State of the session, why it is not up, and how many were lost."""
        return self._watch.status

    @property
    def ready(self) -> Ready | None:
        """What the server said of itself when the newest session began."""
        return self._ready

    def begin(self) -> None:
        """Connect; the session is up once the server has answered."""
        if self._watch.incarnation == 0:
            self._checked_at = time.monotonic()
            self._connect()

    def start(self) -> None:
        """Connect and wait until the server is ready.

        Raises: WorkerError if it does not answer in time, refuses, or has another tokenizer or protocol.
        """
        self._is_awaited = True
        self.begin()
        while self._watch.state == "starting":
            self.wait(0.05)
            self._read()
            self._supervise(time.monotonic())
        if self._watch.state != "up":
            reason = self._watch.reason
            self.close()
            raise WorkerError(f"draft server {self._address} cannot be used: {reason}")

    def send(self, message: TargetMessage) -> None:
        """Send the message unless the session is not up or the queue is full."""
        if self._watch.is_listening:
            self._say(message)

    def receive(self) -> list[DrafterMessage]:
        """Return what has arrived, and look after the session now and then; nothing after `close`."""
        if self._is_closed:
            return []
        now = time.monotonic()
        if now - self._checked_at > _RESTING_AFTER_S:
            self._woke_at = now
        messages = self._read()
        if self._watch.state == "down" and now - self._woke_at < _WAKING_S:
            self._watch.forgive()  # a server drops who does not ping, and nobody did
            self._woke_at = -math.inf
        if now - self._checked_at >= _CHECK_INTERVAL_S:
            self._checked_at = now
            self._supervise(now)
        return messages

    def wait(self, timeout_s: float) -> None:
        """Wait for the next frame of the server."""
        if self._socket is not None:
            self._socket.poll(max(1, round(timeout_s * 1e3)))
        else:
            time.sleep(timeout_s)

    def draft(self, num_passes: int) -> None:
        """Ignored: the server runs by itself."""

    def reject(self, reason: str) -> None:
        """Leave a server that sends nonsense; it is tried again later."""
        self._fail(reason)

    def close(self) -> None:
        """End the session."""
        if self._is_closed:
            return
        self._is_closed = True
        self.send(Shutdown())
        self._disconnect(linger_ms=_FAREWELL_MS)
        self._context.term()
        self._watch.end()

    def _connect(self) -> None:
        self._watch.begin(time.monotonic())
        self._has_connected = False
        self._socket = self._context.socket(zmq.DEALER)
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.SNDHWM: _QUEUED_FRAMES,
            zmq.RCVHWM: _ARRIVED_FRAMES,
            zmq.TCP_KEEPALIVE: 1,
            zmq.RECONNECT_IVL: _RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MS[1],
            zmq.IPV6: 1 if "[" in self._address else 0,
        }
        if self._keys is not None:
            options |= {
                zmq.CURVE_PUBLICKEY: self._keys.public,
                zmq.CURVE_SECRETKEY: self._keys.secret,
                zmq.CURVE_SERVERKEY: self._keys.server,
            }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(self._address)
        self._say(Hello())

    def _disconnect(self, linger_ms: int = 0) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            self._socket = self._monitor = None

    def _say(self, message: TargetMessage) -> None:
        if self._socket is not None:
            try:
                self._socket.send(encode(message, self._watch.incarnation), zmq.NOBLOCK)
            except zmq.Again:
                logger.debug("queue to the draft server is full: %s dropped", type(message).__name__)

    def _read(self) -> list[DrafterMessage]:
        """Return the frames that are here; a bad one ends the session."""
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

    def _mismatch(self, ready: Ready) -> str:
        """Return why the server's model cannot draft for this target; empty if it can."""
        if ready.tokenizer and self._tokenizer:
            if ready.tokenizer != self._tokenizer:
                return "its draft model has another tokenizer than the target; start it with one that shares it"
        elif ready.vocab_size != self._vocab_size:
            return (
                f"its draft model has {ready.vocab_size} tokens, the target has {self._vocab_size}; "
                "start it with a model that shares the target's tokenizer"
            )
        return ""

    def _supervise(self, now: float) -> None:
        """Notice a session that is lost, and begin the next one when its back-off is over."""
        self._look_at_connection()
        is_unreached = self._watch.state == "starting" and not self._has_connected
        if is_unreached and now - self._watch.begun_at > self._connect_timeout_s:
            self._fail(self._why_not_ready())
            return
        match self._watch.advise(now):
            case "start":
                self._connect()
            case "ping":
                self._say(Ping(self._watch.incarnation))
            case "give up":
                self._fail(self._why_not_ready() if self._watch.state == "starting" else self._watch.complaint(now))

    def _look_at_connection(self) -> None:
        """Read what happened to the connection; one that broke off ends the session."""
        while self._monitor is not None and self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
            if event == zmq.EVENT_CONNECTED:
                self._has_connected = True
            elif event & _HANDSHAKE_FAILURES:
                self._fail(self._why_refused(event))
            elif event == zmq.EVENT_DISCONNECTED:
                self._fail("the connection was lost")

    def _why_refused(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it does not know this client's key; put the client's public key into the server's folder `clients`"
        if self._keys is None:
            return "it asks for keys, or is no draft server; give the folder that `card keys` made for this client"
        return "it has another key than this client was given for it, uses no keys, or is no draft server"

    def _why_not_ready(self) -> str:
        if self._has_connected:
            return f"it does not answer in the way of a draft server (waited {self._answer_timeout_s:g} s)"
        return f"nobody answers there (waited {self._connect_timeout_s:g} s); check the address, and that it runs"

    def _fail(self, reason: str) -> None:
        """Drop this session and plan the next one."""
        if self._watch.incarnation == 1 and self._ready is None and not self._is_awaited:
            logger.error("draft server %s cannot be used: %s; decoding goes on without it", self._address, reason)
        else:
            logger.warning("session %d with the draft server is lost: %s", self._watch.incarnation, reason)
        self._disconnect()
        self._watch.fail(time.monotonic(), reason)
