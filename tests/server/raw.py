"""Requests as bytes on connections of their own."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

JSON_TYPE = "Content-Type: application/json\r\n"


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """Open a connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes."""
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            read += data
    return read


def request(*, path: str = "/health", body: bytes = b"", more: str = "", version: str = "1.1") -> bytes:
    """Return a request; with a body, or more headers, a POST."""
    method = "POST" if more or body else "GET"
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n{length}{more}\r\n".encode() + body


def asking(body: dict[str, Any], *, path: str = "/v1/completions", more: str = "", version: str = "1.1") -> bytes:
    """Return a request with a body of JSON."""
    return request(path=path, body=json.dumps(body).encode(), more=JSON_TYPE + more, version=version)


def in_chunks(request_: bytes, size: int = 1) -> bytes:
    """Return the same request with its body in pieces of unstated number."""
    head, _, body = request_.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", b""]) + b"".join(chunks) + b"0\r\n\r\n"


def answers_in(read: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Return status, headers and body of each answer; they all tell their length."""
    found = []
    while read:
        head, _, read = read.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        length = int(headers.get("content-length", 0))
        found.append((int(lines[0].split()[1]), headers, read[:length]))
        read = read[length:]
    return found
