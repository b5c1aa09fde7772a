"""A drafter on a draft server, reached over TCP, watched and replaced by a new session when it is lost."""

from __future__ import annotations

import contextlib
import math
import struct
import time
from pathlib import Path
from typing import Any

import zmq

from card.drafting.messages import MAX_FRAME_BYTES, DrafterMessage, Hello, Ready, Shutdown
from card.links.keys import ClientKeys, check_address, load_client_keys
from card.links.zmq_link import Watch, ZmqLink

# A number and a value: http://api.zeromq.org/4-3:zmq-socket-monitor (zmq's own reader of it imports asyncio).
_EVENT = struct.Struct("=Hi")
_CONNECT_TIMEOUT_S = 3.0  # until the address must have accepted a connection
_ANSWER_TIMEOUT_S = 15.0  # a server listens only after loading, and then answers at once
_RESTING_AFTER_S = 5.0  # a target without requests does not read its link; then the link rests
_WAKING_S = 1.0  # time for waiting messages to arrive after a rest
_QUEUED_FRAMES = 256  # outgoing
_ARRIVED_FRAMES = 4096  # layers of many requests, made during one long pass of the target
_FAREWELL_MS = 200  # for sending the last message
_RECONNECT_MS = (50, 1000)  # first and longest pause between attempts to reach the address
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES


class RemoteLink(ZmqLink):
    """Talks to a draft server. A lost session is replaced by a new one, under a new incarnation, after a back-off."""

    def __init__(
        self,
        address: str | None,
        *,
        vocab_size: int,
        tokenizer: str = "",
        least_layers: int = 1,
        keys: Path | None = None,
        start_timeout_s: float,
        silence_timeout_s: float,
    ) -> None:
        """Read the keys; nothing is sent yet.

        Args:
            address: tcp://host:port of the server; None if it comes with a lease.
            vocab_size: of the target.
            tokenizer: fingerprint of the target's; empty: only the sizes of the vocabularies are compared.
            least_layers: that a pass of its draft model makes; more than one: the method needs a parallel draft model.
            keys: folder with the client's keys; None for a server without keys.
        Raises: SettingsError for a malformed address, or keys that cannot be read.
        """
        self._address = address if address is None else check_address(address)
        self._keys: ClientKeys | None = load_client_keys(keys) if keys is not None else None
        self._vocab_size, self._tokenizer, self._least_layers = vocab_size, tokenizer, least_layers
        self._answer_timeout_s = min(start_timeout_s, _ANSWER_TIMEOUT_S)
        self._connect_timeout_s = min(start_timeout_s, _CONNECT_TIMEOUT_S)
        super().__init__(Watch(start_timeout_s=self._answer_timeout_s, silence_timeout_s=silence_timeout_s))
        self._monitor: zmq.Socket[bytes] | None = None
        self._has_connected = False  # the address answered at least once
        self._reached_out_at = 0.0
        self._woke_at = -math.inf

    def receive(self) -> list[DrafterMessage]:
        """Return the messages that have arrived; check the session now and then; nothing after `close`."""
        now = time.monotonic()
        if now - self._checked_at > _RESTING_AFTER_S:
            self._woke_at = now
        messages = super().receive()
        if self._watch.state == "down" and now - self._woke_at < _WAKING_S and not self._is_closed:
            self._watch.forgive()  # without pings the server may have dropped the session
            self._woke_at = -math.inf
        return messages

    def _not_started(self, reason: str) -> str:
        return f"draft server {self._address} cannot be used: {reason}"

    def _lost(self, reason: str, *, is_first: bool) -> str:
        if is_first:
            return f"draft server {self._address} cannot be used: {reason}; decoding goes on without it"
        return f"session {self._watch.incarnation} with the draft server is lost: {reason}"

    def _farewell(self) -> None:
        self._take_leave()

    def _take_leave(self) -> None:
        """End the session, and tell the server."""
        if self._watch.is_listening:
            self._say(Shutdown())
        self._disconnect(linger_ms=_FAREWELL_MS)

    def _open(self) -> None:
        self._watch.begin(time.monotonic())
        assert self._address is not None
        self._reach_out(self._address)

    def _reach_out(self, address: str) -> None:
        """Begin a session of the present incarnation at this address."""
        self._has_connected, self._reached_out_at = False, time.monotonic()
        self._socket = self._context.socket(zmq.DEALER)
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.SNDHWM: _QUEUED_FRAMES,
            zmq.RCVHWM: _ARRIVED_FRAMES,
            zmq.TCP_KEEPALIVE: 1,
            zmq.RECONNECT_IVL: _RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MS[1],
            zmq.IPV6: 1 if "[" in address else 0,
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
        self._socket.connect(address)
        self._say(Hello())

    def _drop(self) -> None:
        self._disconnect()

    def _disconnect(self, linger_ms: int = 0) -> None:
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):  # there may be no free file for the socket that reports it
                self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            self._socket = self._monitor = None

    def _mismatch(self, ready: Ready) -> str:
        """Return why the server's model does not suit this target; empty if it does."""
        if ready.tokenizer is not None and self._tokenizer:
            if ready.tokenizer != self._tokenizer:
                return "its draft model has another tokenizer than the target; start it with one that shares it"
        elif ready.vocab_size != self._vocab_size:
            return (
                f"its draft model has {ready.vocab_size} tokens, the target has {self._vocab_size}; "
                "start it with a model that shares the target's tokenizer"
            )
        if ready.layers_per_pass < self._least_layers:
            return (
                "its draft model guesses one token a pass, and this method needs several; start it with a model that "
                "card train pard has adapted, or use method sps"
            )
        return ""

    def _is_lost(self, now: float) -> bool:
        """Notice a broken connection, or an address without a server."""
        self._look_at_connection()
        is_unreached = self._watch.state == "starting" and not self._has_connected
        if is_unreached and now - self._reached_out_at > self._connect_timeout_s:
            self._fail(self._complaint(now))
            return True
        return False

    def _complaint(self, now: float) -> str:
        if self._watch.state != "starting":
            return super()._complaint(now)
        if self._has_connected:
            return f"it does not answer like a draft server (waited {self._answer_timeout_s:g} s)"
        return f"no server answers there (waited {self._connect_timeout_s:g} s); check the address and the server"

    def _look_at_connection(self) -> None:
        """Read the connection's events; a broken connection ends the session."""
        while self._monitor is not None and self._monitor.poll(0):
            event, _ = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.EVENT_CONNECTED:
                self._has_connected = True
            elif event & _HANDSHAKE_FAILURES:
                self._fail(self._why_refused(event))
            elif event == zmq.EVENT_DISCONNECTED:
                self._fail("the connection was lost")

    def _why_refused(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it does not have this client's key; put the client's public key into the server's folder `clients`"
        if self._keys is None:
            return "it requires keys, or is not a draft server; give the folder that `card keys` made for this client"
        return "its key differs from the one that this client has, it uses no keys, or it is not a draft server"
