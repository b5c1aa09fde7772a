"""Accepting connections: no more than the process has files for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable

import uvicorn

try:
    import resource
except ImportError:  # there is no such limit
    resource = None  # type: ignore[assignment]

from card.server.connections import LimitedProtocol, ServerConfig, refusal
from card.server.errors import ApiError
from card.server.logs import log_event

logger = logging.getLogger(__name__)

OTHER_FILES = 256  # open files other than connections: models, pipes, housekeeping
_BACKLOG = 2048  # connections that wait to be accepted
_AT_ONCE = 16  # connections accepted before the event loop does other work
RETRY_S = 1.0  # pause before the next try to accept, when the system has no file or memory for a connection
_TELL_S = 60.0  # between two log lines about such a pause
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def room_for(max_connections: int) -> int:
    """Raise the limit on open files for ``max_connections``; return how many connections it allows."""
    if resource is None:
        return max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == wanted:
        return max_connections
    room = most - min(OTHER_FILES, most // 2)
    advice = "raise the limit on open files, or lower --max-connections"
    log_event(logger, logging.WARNING, "few open files", allowed=most, wanted=wanted, connections=room, advice=advice)
    return room


class Server(uvicorn.Server):
    """uvicorn with our own way of accepting connections."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._limits = config.limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on these sockets."""
        await super().startup([])

        def begin() -> LimitedProtocol:
            return LimitedProtocol(self.config, self.server_state, self.lifespan.state)  # type: ignore[arg-type]

        most = self._limits.max_connections
        connections = self.server_state.connections
        self.servers = [_Acceptor(sock, begin, lambda: len(connections), most) for sock in sockets or ()]  # type: ignore


class _Acceptor:
    """Accepts the connections of one socket; answers surplus ones with an error and closes them."""

    def __init__(
        self, listener: socket.socket, begin: Callable[[], LimitedProtocol], num_open: Callable[[], int], most: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, self._begin, self._num_open, self._most = listener, begin, num_open, most
        self._beginning: set[asyncio.Task[None]] = set()  # accepted, not counted as open yet
        reason = f"the server has {most} connections, the most it accepts; try again soon"
        self._refusal = refusal(ApiError(503, reason, code="too_many_connections", retry_after_s=1))
        self._told_at = float("-inf")
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listen()

    def close(self) -> None:
        """Stop accepting."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        """Wait for connections that are just beginning."""
        await asyncio.gather(*self._beginning)

    def _listen(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._rest(error)
                return
            if self._num_open() + len(self._beginning) >= self._most:
                self._refuse(accepted)
                continue
            task = self._loop.create_task(self._connect(accepted))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._begin, accepted)
        except OSError:  # the client has already closed it
            accepted.close()

    def _refuse(self, accepted: socket.socket) -> None:
        with contextlib.closing(accepted), contextlib.suppress(OSError):
            accepted.setblocking(False)
            accepted.send(self._refusal)
            accepted.shutdown(socket.SHUT_WR)
            accepted.recv(65536)  # unread bytes would make the system reset the connection

    def _rest(self, error: OSError) -> None:
        """Pause accepting: the socket stays ready, and another attempt at once would fail again."""
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(RETRY_S, self._listen)
        if self._loop.time() - self._told_at >= _TELL_S:
            self._told_at = self._loop.time()
            log_event(logger, logging.WARNING, "no connection can be accepted", reason=error.strerror)
