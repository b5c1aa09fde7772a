"""Connections of a draft server: their bytes are checked and counted before ZeroMQ gets them.

A thread accepts clients and passes the bytes of each one to a separate socket inside this process. So ZeroMQ holds no
more data of a client than `Framing` accepts, and the server knows which client sent a message.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from card.drafting.messages import MAX_REQUEST_BYTES
from card.errors import SettingsError
from card.links.framing import FRAME_OVERHEAD_BYTES, Framing
from card.links.keys import ServerKeys, split_address

logger = logging.getLogger(__name__)
FOLDER_PREFIX = "card-"  # of the folder with the inner sockets
_CHUNK_BYTES = 1 << 16
_BACKLOG = 128
_MOST_STRANGERS = 64  # connections without a session; a further one replaces another
_NO_FILES_PAUSE_S = 0.1  # before the next try to accept, when the process may open no more files
_LONGEST_FOLDER = 90  # bytes; a socket's name may have 107
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Connection:
    """One client. The front's thread moves its bytes; everything else belongs to the server's thread."""

    def __init__(
        self, number: int, host: str, messages: zmq.Socket[bytes], outer: socket.socket, inner: socket.socket
    ) -> None:
        self.number = number  # in order of arrival
        self.host = host
        self.messages = messages
        self.num_taken = 0  # messages that the server has read
        self.has_session = False
        self.is_unwanted = False  # the front must drop it
        self.is_over = False  # no more data will come
        self.outer, self.inner = outer, inner
        self.framing = Framing()
        self.to_client, self.to_server = bytearray(), bytearray()
        self.is_waiting = False  # too many of its bytes are unread: it must wait


class Front:
    """Accepts clients. The server's thread gets them from `arrivals`, and closes the sockets of those that left."""

    def __init__(self, address: str, context: zmq.Context[Any], keys: ServerKeys | None, queued_frames: int) -> None:
        """Listen.

        Raises: OSError if the address is not free; SettingsError if the path of the folder for sockets is too long.
        """
        self._context = context
        self._authenticator: ThreadAuthenticator | None = None
        self._options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_REQUEST_BYTES + FRAME_OVERHEAD_BYTES,
            zmq.SNDHWM: queued_frames,
            zmq.RCVHWM: queued_frames,
        }
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # readable by this user only
        try:
            self._listener = _listen(address, self._folder)
        except (OSError, SettingsError):
            self._folder.rmdir()
            raise
        self._num_accepted = 0
        self._connections: set[Connection] = set()
        self._arrived: deque[Connection] = deque()
        self._is_closed = False
        self._ear, self._bell = socket.socketpair()  # wakes the front's thread
        self._server_ear, self._server_bell = socket.socketpair()  # wakes the server's thread
        self._selector = selectors.DefaultSelector()
        for end in (self._ear, self._bell, self._server_ear, self._server_bell):
            end.setblocking(False)
        self._selector.register(self._ear, _READ)
        self._selector.register(self._listener, _READ)
        if keys is not None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve(domain="*", location=keys.clients)
            self._options |= {zmq.CURVE_SERVER: 1, zmq.CURVE_PUBLICKEY: keys.public, zmq.CURVE_SECRETKEY: keys.secret}
        self._thread = threading.Thread(target=self._run, name="card-draft-front", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address that clients connect to, with the port that was chosen."""
        host, port = self._listener.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    @property
    def ear(self) -> int:
        """File that becomes readable when a connection has come or ended; `arrivals` empties it."""
        return self._server_ear.fileno()

    def arrivals(self) -> list[Connection]:
        """Return connections that have come since the last call."""
        _empty(self._server_ear)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def wake(self) -> None:
        """Wake the front: a waiting client's messages were read, or a connection must be dropped."""
        _ring(self._bell)

    def close(self) -> None:
        """End all connections, and the thread. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        _ring(self._bell)
        self._thread.join()
        known = {*self._connections, *self._arrived}  # new ones are in both, and those that left at once in the latter
        for connection in tuple(self._connections):
            self._drop(connection, "")
        for connection in known:
            connection.messages.close()
        for end in (self._listener, self._ear, self._bell, self._server_ear, self._server_bell):
            end.close()
        self._selector.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- the front's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select():
                if key.fileobj is self._ear:
                    _empty(self._ear)
                    for connection in [one for one in self._connections if one.is_waiting or one.is_unwanted]:
                        self._look_again(connection)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:
                    self._move(key.data, is_outer=key.fileobj is key.data.outer, events=events)

    def _accept(self) -> None:
        try:
            outer, peer = self._listener.accept()
        except OSError as error:  # the client has left already, or too many files are open
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_NO_FILES_PAUSE_S)
            return
        self._make_room()
        try:
            connection = self._connect(outer, str(peer[0]))
        except (OSError, zmq.ZMQError) as error:
            logger.warning("a client cannot be accepted: %s", error)
            outer.close()
            return
        self._connections.add(connection)
        self._watch(connection)
        self._arrived.append(connection)
        _ring(self._server_bell)

    def _make_room(self) -> None:
        """If too many clients have no session, drop the oldest one of the address with the most."""
        strangers = [one for one in self._connections if not one.has_session]
        if len(strangers) >= _MOST_STRANGERS:
            most = Counter(one.host for one in strangers)
            self._drop(min(strangers, key=lambda one: (-most[one.host], one.number)), "it made room for others")

    def _connect(self, outer: socket.socket, host: str) -> Connection:
        """Make the inner socket of a connection. Raises: OSError, ZMQError."""
        outer.setblocking(False)
        outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._num_accepted += 1
        path = self._folder / str(self._num_accepted)
        inner = socket.socket(socket.AF_UNIX)
        messages: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            for option, value in self._options.items():
                messages.setsockopt(option, value)
            messages.bind(f"ipc://{path}")
            inner.connect(os.fspath(path))
        except (OSError, zmq.ZMQError):
            messages.close()
            inner.close()
            raise
        inner.setblocking(False)
        return Connection(self._num_accepted, host, messages, outer, inner)

    def _move(self, connection: Connection, *, is_outer: bool, events: int) -> None:
        """Move bytes of a connection; drop it if it has ended or breaks the protocol."""
        try:
            fault = self._moved(connection, is_outer=is_outer, events=events)
        except (BlockingIOError, InterruptedError):
            fault = None
        except OSError:
            fault = ""
        if fault is None:
            self._watch(connection)
        else:
            self._drop(connection, fault)

    def _moved(self, connection: Connection, *, is_outer: bool, events: int) -> str | None:
        """Move bytes. Returns: why the connection has ended, empty without a reason; None if it goes on."""
        source, sink = connection.outer, connection.inner
        waiting, returning = connection.to_server, connection.to_client
        if not is_outer:
            source, sink, waiting, returning = sink, source, returning, waiting
        if events & _WRITE and returning:
            _send(source, returning)
        if not events & _READ or waiting:
            return None
        data = source.recv(_CHUNK_BYTES)
        if not data:
            return ""
        if is_outer and (fault := connection.framing.feed(data)):
            return fault
        waiting += data
        _send(sink, waiting)
        return None

    def _look_again(self, connection: Connection) -> None:
        if connection.is_unwanted:
            self._drop(connection, "")
        else:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Poll for the events that this connection can handle next."""
        connection.is_waiting = True  # before counting: the server rings the bell for anything it reads later
        is_stranger = not connection.has_session
        connection.is_waiting = connection.framing.is_full(connection.num_taken, is_stranger=is_stranger)
        may_speak = not connection.to_server and not connection.is_waiting
        self._look(connection, connection.outer, _READ * may_speak | _WRITE * bool(connection.to_client))
        self._look(
            connection, connection.inner, _READ * (not connection.to_client) | _WRITE * bool(connection.to_server)
        )

    def _look(self, connection: Connection, end: socket.socket, events: int) -> None:
        key = self._selector.get_map().get(end)
        if key is None:
            if events:
                self._selector.register(end, events, connection)
        elif not events:
            self._selector.unregister(end)
        elif key.events != events:
            self._selector.modify(end, events, connection)

    def _drop(self, connection: Connection, reason: str) -> None:
        if reason:
            logger.warning("the connection of %s is dropped: %s", connection.host, reason)
        for end in (connection.outer, connection.inner):
            self._look(connection, end, 0)
            end.close()
        self._connections.discard(connection)
        connection.is_over = True
        _ring(self._server_bell)


def _listen(address: str, folder: Path) -> socket.socket:
    """Return a socket that listens. Raises: OSError, SettingsError."""
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise SettingsError(f"sockets cannot lie in {folder}, whose name is too long; set TMPDIR to a short path")
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_for_both = host == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_for_both)
    listener.setblocking(False)
    return listener


def _send(end: socket.socket, data: bytearray) -> None:
    """Send as much as possible without waiting, and keep the rest."""
    with contextlib.suppress(BlockingIOError, InterruptedError):
        del data[: end.send(data)]


def _ring(bell: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):  # it is ringing already
        bell.send(b"!")


def _empty(ear: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while ear.recv(_CHUNK_BYTES):
            pass
