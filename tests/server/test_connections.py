"""Clients that send slowly, never, or too much lose their connection; the others are answered all the while."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from tests.server.raw import connected, read_all, request
from tests.server.running import PROMPT, Running, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

_SHORT_S = 0.3
_TRICKLE = b"X-Slow: yes\r\n"
_MOST = 8


@pytest.fixture(scope="module")
def strict(shared_server: Running) -> Iterator[Running]:
    """A server with little patience and few connections."""
    limits = {"head_timeout_s": _SHORT_S, "body_timeout_s": _SHORT_S, "max_connections": _MOST}
    with serving(shared_server.llm, **limits) as server:
        yield server


def trickle(connection: socket.socket, piece: bytes) -> bytes:
    """Send a piece again and again until the other side has had enough, and return what it said."""
    read = b""
    connection.settimeout(_SHORT_S / 10)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while True:
            connection.sendall(piece)
            with contextlib.suppress(TimeoutError):
                data = connection.recv(65536)
                if not data:
                    return read
                read += data
    return read


def refusal(answer: bytes, status: int) -> str:
    """Return the code of an error, which must be whole and in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"GET /he", b"\r\n\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(strict: Running, start: bytes) -> None:
    with connected(strict.url) as connection:
        connection.sendall(start)
        assert refusal(read_all(connection), 408) == "head_timeout"


@pytest.mark.parametrize("begin", [b"", request()])
@pytest.mark.parametrize("piece", [_TRICKLE, b"\r\n"])
def test_a_head_that_never_ends_is_not_waited_for_however_steadily_it_comes(
    strict: Running, begin: bytes, piece: bytes
) -> None:
    with connected(strict.url) as connection:
        if begin:
            connection.sendall(begin)
            read = b""
            while not read.endswith(b"}"):
                read += connection.recv(65536)
            assert read.startswith(b"HTTP/1.1 200")
        if piece == _TRICKLE:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert refusal(trickle(connection, piece), 408) == "head_timeout"


@pytest.mark.parametrize("piece", [b"A" * 8192, b"X: " + b"a" * 100 + b"\r\n"])
def test_a_head_may_not_be_large(shared_server: Running, piece: bytes) -> None:
    with serving(shared_server.llm) as server, connected(server.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: ")
        for _ in range(1_000_000 // len(piece)):
            try:
                connection.sendall(piece)
            except (ConnectionResetError, BrokenPipeError):
                break
        answer = read_all(connection)
        assert not answer or refusal(answer, 431) == "head_too_large"
        assert server.client.get("/health").status_code == 200
        until(lambda: server.service.gate.num_requests == 0)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_does_not_come_ends_the_connection(strict: Running, is_chunked: bool) -> None:
    length = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 1000"
    head = request(path="/v1/completions", more=f"Content-Type: application/json\r\n{length}\r\n")
    for piece in (b"", b"1\r\n{\r\n" if is_chunked else b"{"):
        with connected(strict.url) as connection:
            connection.sendall(head)
            answer = trickle(connection, piece) if piece else read_all(connection)
            assert refusal(answer, 408) == "body_timeout"


def test_an_answer_may_take_longer_than_a_head(strict: Running) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": True}).encode()
    with connected(strict.url) as connection:
        connection.sendall(request(path="/v1/completions", body=body, more="Content-Type: application/json\r\n"))
        connection.sendall(b"GET /hea")  # the head of the next one, which can wait
        answer = read_all(connection)
        assert b"[DONE]" in answer
        assert refusal(answer[answer.rindex(b"HTTP/1.1 ") :], 408) == "head_timeout"


def test_who_is_not_http_is_told_in_our_own_shape(strict: Running) -> None:
    with connected(strict.url) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert refusal(read_all(connection), 400) == "bad_http"


def test_there_are_only_so_many_connections_and_idle_ones_make_place(strict: Running) -> None:
    strict.client.close()  # it keeps a connection of its own
    until(lambda: not strict.connections)
    with contextlib.ExitStack() as stack:
        for _ in range(_MOST):
            stack.enter_context(connected(strict.url))
        with connected(strict.url) as connection:
            assert refusal(read_all(connection), 503) == "too_many_connections"

        def is_answered() -> bool:
            with connected(strict.url) as connection:
                connection.sendall(request(more="Connection: close\r\n").replace(b"POST", b"GET"))
                return read_all(connection).startswith(b"HTTP/1.1 200")

        until(is_answered)  # idle ones are closed, though their clients hold on


def test_a_client_that_takes_nothing_of_its_answer_is_not_waited_for(strict: Running) -> None:
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.sendall(request(path="/openapi.json") * 2000)  # answers of more than any buffer holds
        until(lambda: strict.connections)
        until(lambda: not strict.connections)
