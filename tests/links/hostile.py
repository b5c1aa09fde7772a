"""Clients that speak ZeroMQ's protocol (ZMTP 3) themselves, and so can say what no library would."""

from __future__ import annotations

import socket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_SOCKET_TYPE = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
_ANSWER_BYTES = 107  # of the server's own handshake
MORE, COMMAND = 1, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame as it goes over the wire."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


_HANDSHAKE = GREETING + frame(b"\x05READY" + _SOCKET_TYPE, COMMAND)


def connect(address: str) -> socket.socket:
    """Return a plain connection to a server."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20.0)


def shake_hands(connection: socket.socket) -> None:
    """Do what must be done before messages are sent: ZeroMQ takes none before it has said that it is ready."""
    connection.sendall(_HANDSHAKE)
    num_heard = 0
    while num_heard < _ANSWER_BYTES:
        data = connection.recv(_ANSWER_BYTES - num_heard)
        assert data, "the server has ended the connection"
        num_heard += len(data)


def is_ended(connection: socket.socket) -> bool:
    """Wait until the server has ended the connection; false if it has not for as long as the socket's timeout."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
