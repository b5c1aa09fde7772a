"""The server's address, bound before anything is loaded."""

from __future__ import annotations

import socket

from card.errors import SettingsError
from card.server.config import ServerSettings


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the address for this process alone. Raises: SettingsError if it is not available.

    Listening begins now, since two sockets that are only bound can share an address. A client that connects before the
    model is loaded waits.
    """
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except OSError as error:
        if sock is not None:
            sock.close()
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; choose another --host or --port"
        ) from error
    return sock
