"""The draft server: one draft model for the targets of a whole network, each in a session of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from card.config.fields import check, setting
from card.errors import CardError, ProtocolError, SettingsError, in_words
from card.protocol.messages import (
    MAX_REQUEST_BYTES,
    DrafterMessage,
    Fault,
    Hello,
    Ping,
    Pong,
    Ready,
    Shutdown,
    decode,
    encode,
)
from card.transport.keys import ServerKeys, check_may_listen
from card.workers.drafter import MAX_REQUESTS, MAX_TOKENS_PER_PASS, DrafterWorker
from card.workers.drafter_pass import step_together

logger = logging.getLogger(__name__)
_IDLE_POLL_MS = 200
_PROBE_INTERVAL_S = 1.0  # between looks whether clients are still there
_FRAMES_PER_LOOP = 256  # then a pass is made, whoever still has something to say
_QUEUED_FRAMES = 128  # per client and direction; more are dropped on the way out, and wait on the way in
_FAILURES = (CardError, RuntimeError, MemoryError)  # out of memory is a RuntimeError in torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of what the server grants its clients."""

    max_sessions: int = setting(16, least=1)
    max_requests: int = setting(MAX_REQUESTS, least=1)  # open at once, per session
    max_tokens_per_pass: int = setting(MAX_TOKENS_PER_PASS, least=1)  # of all sessions together
    silence_timeout_s: float = setting(30.0, above=0, unit="seconds")  # after which a session is dropped

    def __post_init__(self) -> None:
        check(self)


@dataclass(slots=True)
class _Session:
    """One client: its requests, under ids of its own, and when it was heard last."""

    worker: DrafterWorker
    incarnation: int
    heard_at: float


class DraftServer:
    """Serves targets over TCP from one thread: reads what has come, makes one pass for all, sends the layers.

    A client that breaks the rules is told why and loses its session; it may begin another one. A client that does not
    read loses messages, which the protocol survives. Nobody else notices either.
    """

    def __init__(
        self,
        address: str,
        open_worker: Callable[..., DrafterWorker],
        ready: Ready,
        *,
        keys: ServerKeys | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        """Listen on ``address``, tcp://host:port.

        Args:
            open_worker: makes the worker of a session; gets ``max_requests`` and ``peers`` as `DrafterWorker` does.
            ready: what each client is told of the model.
            keys: those of the server and of its clients; None lets everyone in who can reach the address.
        Raises: SettingsError if the address is not free, or is open to others and there are no keys.
        """
        check_may_listen(address, has_keys=keys is not None)
        self._open_worker, self._ready = open_worker, ready
        self._limits = limits or ServerLimits()
        self._sessions: dict[bytes, _Session] = {}
        self._is_stopping = False
        self._probed_at = 0.0
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._bind(address, keys)
        except zmq.ZMQError as error:
            self.close()
            raise SettingsError(
                f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}; choose another address"
            ) from error

    def _bind(self, address: str, keys: ServerKeys | None) -> None:
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.ROUTER_MANDATORY: 1,  # a client that is gone is an error instead of silence
            zmq.MAXMSGSIZE: MAX_REQUEST_BYTES,
            zmq.SNDHWM: _QUEUED_FRAMES,
            zmq.RCVHWM: _QUEUED_FRAMES,
            zmq.TCP_KEEPALIVE: 1,  # ZeroMQ's own heartbeats abort the process when a peer leaves a full queue behind
            zmq.IPV6: 1 if "[" in address else 0,
        }
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve(domain="*", location=keys.clients)
            options |= {zmq.CURVE_SERVER: 1, zmq.CURVE_PUBLICKEY: keys.public, zmq.CURVE_SECRETKEY: keys.secret}
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.bind(address)

    @property
    def address(self) -> str:
        """Address that clients connect to, with the port that was chosen."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def num_sessions(self) -> int:
        """Clients that are served."""
        return len(self._sessions)

    def run(self) -> None:
        """Serve until `stop` is called."""
        while not self._is_stopping:
            is_idle = all(session.worker.is_idle for session in self._sessions.values())
            self.serve_once(_IDLE_POLL_MS if is_idle else 0)

    def serve_once(self, wait_ms: int) -> None:
        """Wait so long for something to come, take what has come, and make one pass for all who want one."""
        if self._socket.poll(wait_ms):
            self._read()
        self._drop_silent()
        if time.monotonic() - self._probed_at > _PROBE_INTERVAL_S:
            self._drop_vanished()
        self._draft()

    def stop(self) -> None:
        """Let `run` return soon; may be called from a signal handler or another thread."""
        self._is_stopping = True

    def close(self) -> None:
        """Free the address. To be called after `run` has returned; may be called twice."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()

    def _read(self) -> None:
        for _ in range(_FRAMES_PER_LOOP):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a message has one frame, got {len(frames)}")
                self._take(client, frames[0])
            except ProtocolError as error:
                self._end(client, str(error))
            except _FAILURES as error:
                self._end(client, in_words(error))

    def _take(self, client: bytes, frame: bytes) -> None:
        """Take one frame. Raises: ProtocolError if the client may not send it."""
        incarnation, message = decode(frame)
        session = self._sessions.get(client)
        if isinstance(message, Hello):
            self._welcome(client, incarnation)
            return
        if session is None or session.incarnation != incarnation:
            self._send(client, incarnation, [Fault("the server knows of no such session; begin a new one")])
            return
        session.heard_at = time.monotonic()
        if isinstance(message, Ping):  # is no reason to look for work
            self._send(client, incarnation, [Pong(message.nonce)])
            return
        self._send(client, incarnation, session.worker.receive(message))  # type: ignore[arg-type]
        if session.worker.is_shut_down:
            self._forget(client)

    def _welcome(self, client: bytes, incarnation: int) -> None:
        known = self._sessions.get(client)
        if known is not None and known.incarnation != incarnation:
            self._forget(client)
            known = None
        if known is None:
            if len(self._sessions) >= self._limits.max_sessions:
                self._drop_vanished()
            if len(self._sessions) >= self._limits.max_sessions:
                reason = f"the server is full: it takes {self._limits.max_sessions} clients (--max-sessions)"
                self._send(client, incarnation, [Fault(reason)])
                return
            worker = self._open_worker(
                max_requests=self._limits.max_requests,
                peers=lambda: [session.worker for session in self._sessions.values()],
            )
            self._sessions[client] = _Session(worker, incarnation, time.monotonic())
            logger.info("a client has come; there are %d", len(self._sessions))
        self._send(client, incarnation, [self._ready])

    def _draft(self) -> None:
        """Make one pass for all sessions."""
        clients = list(self._sessions)
        if not clients:
            return
        workers = [self._sessions[client].worker for client in clients]
        try:
            results = step_together(workers, max_tokens=self._limits.max_tokens_per_pass)
        except _FAILURES as error:
            logger.warning("a pass failed, all sessions are dropped: %s", error)
            for client in clients:
                self._end(client, in_words(error))
            return
        for client, result in zip(clients, results, strict=True):
            self._send(client, self._sessions[client].incarnation, result)

    def _drop_silent(self) -> None:
        oldest = time.monotonic() - self._limits.silence_timeout_s
        for client in [client for client, session in self._sessions.items() if session.heard_at < oldest]:
            self._end(client, f"nothing heard for {self._limits.silence_timeout_s:g} s")

    def _drop_vanished(self) -> None:
        """Free the places of clients whose connection has ended, with or without a word.

        ZeroMQ says so only to those who send something. A client takes a `Pong` that it did not ask for as a sign of
        life, which it is.
        """
        self._probed_at = time.monotonic()
        for client, session in list(self._sessions.items()):
            self._send(client, session.incarnation, [Pong(0)])

    def _end(self, client: bytes, reason: str) -> None:
        """Drop a session, if there is one, and tell the client why."""
        session = self._sessions.get(client)
        logger.info("a client is refused: %s", reason)
        self._forget(client)
        self._send(client, session.incarnation if session else 0, [Fault(reason)])

    def _forget(self, client: bytes) -> None:
        """Free what the requests of a client hold."""
        session = self._sessions.pop(client, None)
        if session is not None:
            session.worker.receive(Shutdown())

    def _send(self, client: bytes, incarnation: int, messages: list[DrafterMessage]) -> None:
        for message in messages:
            try:
                self._socket.send_multipart([client, encode(message, incarnation)], zmq.NOBLOCK)
            except zmq.Again:
                return  # its queue is full; a gap in the numbers of its layers makes it ask again
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                if client in self._sessions:
                    logger.info("a client has vanished; there are %d", len(self._sessions) - 1)
                self._forget(client)
                return
