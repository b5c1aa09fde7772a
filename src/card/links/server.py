"""The draft server: one draft model for the targets of a network, with a session for each target."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from socket import gaierror

import zmq

from card.config.fields import check, setting
from card.drafting.drafter import MAX_REQUESTS, MAX_TOKENS_PER_PASS, DrafterWorker
from card.drafting.drafter_pass import step_together
from card.drafting.messages import (
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
from card.errors import ProtocolError, SettingsError, in_words, plain_words
from card.links.front import Connection, Front
from card.links.keys import ServerKeys, check_may_listen

logger = logging.getLogger(__name__)
_IDLE_POLL_MS = 200
# Most messages read from each client before a pass, even if more wait.
_MESSAGES_PER_LOOP = 32
_BYTES_PER_LOOP = 1 << 20  # answers included
_QUEUED_FRAMES = 128  # per client and direction; further outgoing ones are dropped, further incoming ones wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits for the server's clients."""

    max_sessions: int = setting(16, least=1)
    max_sessions_per_client: int | None = setting(None, least=1, allowed="1 or more, or None")
    max_requests: int = setting(MAX_REQUESTS, least=1)  # open at once per session
    max_tokens_per_pass: int = setting(MAX_TOKENS_PER_PASS, least=1)  # of all sessions together
    silence_timeout_s: float = setting(30.0, above=0, unit="seconds")  # until a session is dropped

    def __post_init__(self) -> None:
        check(self)

    def sessions_per_client(self, num_keys: int) -> int:
        """Return the most sessions of one key, or of one address if there are no keys.

        By default a client may have half of all sessions if several clients have keys. Otherwise it may have all:
        without keys all clients have the address of this machine, and with a single key they are one client.
        """
        if self.max_sessions_per_client is not None:
            return self.max_sessions_per_client
        return self.max_sessions if num_keys < 2 else (self.max_sessions + 1) // 2


@dataclass(slots=True)
class _Session:
    """A client's requests, under separate ids."""

    worker: DrafterWorker
    incarnation: int


@dataclass(slots=True)
class _Client:
    """One connection, with or without a session."""

    connection: Connection
    heard_at: float  # time of its last message in a session, or since when it has none
    key: str = ""  # its public key; empty without keys, and until its first message
    session: _Session | None = None

    @property
    def identity(self) -> str:
        """The client's key, or its address if there are no keys."""
        return self.key or self.connection.host


class DraftServer:
    """Serves targets over TCP from one thread: reads their messages, makes one pass for all, sends the layers.

    A client that breaks the rules gets the reason and loses its session; it may begin another one. A client that does
    not read loses messages, which the protocol tolerates. Neither affects other clients.
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
            open_worker: makes the worker of a session; gets ``max_requests`` and ``peers`` as in `DrafterWorker`.
            ready: the description of the model for each client.
            keys: keys of the server and its clients; None accepts every client that reaches the address.
        Raises: SettingsError if the address is not free, or other machines can reach it and there are no keys.
        """
        check_may_listen(address, has_keys=keys is not None)
        self._open_worker, self._ready = open_worker, ready
        self._limits = limits or ServerLimits()
        num_keys = len(list(keys.clients.glob("*.key"))) if keys is not None else 0
        self._most_per_client = self._limits.sessions_per_client(num_keys)
        self._clients: list[_Client] = []
        self._is_stopping = self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = Front(address, self._context, keys, _QUEUED_FRAMES)
        except OSError as error:
            self._context.term()
            reason = error.strerror if isinstance(error, gaierror) else os.strerror(error.errno or 0)
            raise SettingsError(f"cannot listen on {address}: {reason}; choose another address") from error
        except SettingsError:
            self._context.term()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._front.ear, zmq.POLLIN)

    @property
    def address(self) -> str:
        """Address that clients connect to, with the port that was chosen."""
        return self._front.address

    @property
    def num_sessions(self) -> int:
        """Number of clients with a session."""
        return len(self._serving())

    def run(self) -> None:
        """Serve until `stop` is called."""
        while not self._is_stopping:
            is_idle = all(session.worker.is_idle for _, session in self._serving())
            self.serve_once(_IDLE_POLL_MS if is_idle else 0)

    def serve_once(self, wait_ms: int) -> None:
        """Wait at most so long for messages, read them, and make one pass for all sessions with work."""
        if self._poller.poll(wait_ms):
            self._read()
        self._drop_silent()
        self._draft()

    def stop(self) -> None:
        """Let `run` return soon; may be called from a signal handler or another thread."""
        self._is_stopping = True

    def close(self) -> None:
        """Free the address. Call it after `run` has returned; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._front.close()
        for client in self._clients:
            client.connection.messages.close()
        self._context.term()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _serving(self) -> list[tuple[_Client, _Session]]:
        return [(client, client.session) for client in self._clients if client.session is not None]

    def _read(self) -> None:
        """Accept new clients, read the messages of all, and remove clients that have left."""
        self._accept()
        for client in list(self._clients):
            was_waiting = self._read_from(client)
            if was_waiting:
                self._front.wake()
        self._remove_gone()

    def _accept(self) -> None:
        for connection in self._front.arrivals():
            self._clients.append(_Client(connection, time.monotonic()))
            self._poller.register(connection.messages, zmq.POLLIN)

    def _remove_gone(self) -> None:
        """Free the places of clients whose connection has ended."""
        for client in [client for client in self._clients if client.connection.is_over]:
            self._read_from(client)
            if client.session is not None:
                logger.info("a client has left; there are %d", self.num_sessions - 1)
            self._forget(client)
            self._clients.remove(client)
            self._poller.unregister(client.connection.messages)
            client.connection.messages.close()

    def _read_from(self, client: _Client) -> bool:
        """Read some messages of a client. Returns: whether more wait."""
        num_bytes = 0
        for _ in range(_MESSAGES_PER_LOOP):
            if num_bytes >= _BYTES_PER_LOOP:
                break
            try:
                frames = client.connection.messages.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a message must be one frame, got {len(frames)}")
                client.key = client.key or _key_of(frames[0])
                num_bytes += len(frames[0]) + self._handle(client, frames[0].bytes)
            except ProtocolError as error:
                self._end(client, str(error))
            except Exception as error:  # no client's message may affect the other clients
                logger.warning("a client's message failed", exc_info=error)
                self._end(client, in_words(error))
            client.connection.num_taken += len(frames)
        return client.connection.is_waiting

    def _handle(self, client: _Client, frame: bytes) -> int:
        """Handle one frame. Returns: bytes of the answers. Raises: ProtocolError if the client may not send it."""
        incarnation, message = decode(frame)
        session = client.session
        if isinstance(message, Hello):
            self._welcome(client, incarnation)
            return 0
        if session is None or session.incarnation != incarnation:
            fault = Fault("the server has no such session; begin a new one")
            return self._send(client, incarnation, [fault])
        client.heard_at = time.monotonic()
        if isinstance(message, Ping):  # brings no work
            return self._send(client, incarnation, [Pong(message.nonce)])
        num_bytes = self._send(client, incarnation, session.worker.receive(message))  # type: ignore[arg-type]
        if session.worker.is_shut_down:
            self._forget(client)
        return num_bytes

    def _welcome(self, client: _Client, incarnation: int) -> None:
        if client.session is not None and client.session.incarnation != incarnation:
            self._forget(client)
        if client.session is None:
            if reason := self._no_place(client):
                logger.warning("a client is refused: %s", reason)
                self._send(client, incarnation, [Fault(reason)])
                return
            worker = self._open_worker(
                max_requests=self._limits.max_requests,
                peers=lambda: [session.worker for _, session in self._serving()],
            )
            client.session = _Session(worker, incarnation)
            client.connection.has_session = True
            client.heard_at = time.monotonic()
            logger.info("a client has come; there are %d", self.num_sessions)
        self._send(client, incarnation, [self._ready])

    def _no_place(self, client: _Client) -> str:
        """Return the limit that a further session of this client would break; empty if none."""
        serving = [other for other, _ in self._serving() if not other.connection.is_over]
        if len(serving) >= self._limits.max_sessions:
            return f"the server is full: it accepts {self._limits.max_sessions} clients (--max-sessions)"
        if sum(other.identity == client.identity for other in serving) >= self._most_per_client:
            whose = "with the same key" if client.key else "from the same address"
            return (
                f"the server accepts at most {self._most_per_client} clients {whose} (--max-sessions-per-client), "
                "and it has as many already"
            )
        return ""

    def _draft(self) -> None:
        """Make one pass for all sessions."""
        serving = self._serving()
        if not serving:
            return
        workers = [session.worker for _, session in serving]
        try:
            results = step_together(workers, max_tokens=self._limits.max_tokens_per_pass)
        except Exception as error:  # the model cannot run any text now
            logger.warning("the draft model fails for all texts; all sessions are dropped: %s", in_words(error))
            for client, _ in serving:
                self._end(client, in_words(error))
            return
        for (client, session), result in zip(serving, results, strict=True):
            self._send(client, session.incarnation, result)

    def _drop_silent(self) -> None:
        """End silent sessions, and connections that begin no session."""
        now = time.monotonic()
        oldest = now - self._limits.silence_timeout_s
        for client in [client for client in self._clients if client.heard_at < oldest]:
            if client.session is not None:
                self._end(client, f"no message for {self._limits.silence_timeout_s:g} s")
                client.heard_at = now
            elif not client.connection.is_unwanted:
                client.connection.is_unwanted = True
                self._front.wake()

    def _end(self, client: _Client, reason: str) -> None:
        """Drop a session, if there is one, and tell the client why."""
        reason = plain_words(reason)
        logger.info("a client is refused: %s", reason)
        incarnation = client.session.incarnation if client.session else 0
        self._forget(client)
        self._send(client, incarnation, [Fault(reason)])

    def _forget(self, client: _Client) -> None:
        """Free the resources of a client's requests."""
        session, client.session = client.session, None
        client.connection.has_session = False
        if session is not None:
            session.worker.receive(Shutdown())

    def _send(self, client: _Client, incarnation: int, messages: list[DrafterMessage]) -> int:
        """Send as much as fits into the client's queue. Returns: bytes sent."""
        num_bytes = 0
        for message in messages:
            frame = encode(message, incarnation)
            num_bytes += len(frame)
            try:
                client.connection.messages.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                break  # its queue is full, or it has left; a gap in the layer numbers makes it ask again
        return num_bytes


def _key_of(frame: zmq.Frame) -> str:
    """Return the public key of a frame's sender; empty if there are no keys."""
    try:
        return str(frame.get("User-Id"))
    except (KeyError, zmq.ZMQError):
        return ""
