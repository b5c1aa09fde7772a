"""Clients that speak HTTP in their own way: upgrades, old versions, sides closed early, many requests at once."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.server.raw import JSON_TYPE, answers_in, asking, connected, in_chunks, read_all, request
from tests.server.running import PROMPT, Running, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

ASKED = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
LONG = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
CLOSE = "Connection: close\r\n"
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"  # as Java's client


@pytest.fixture(scope="module")
def plain(shared_server: Running) -> Iterator[Running]:
    """A server with bounds as by default."""
    with serving(shared_server.llm) as server:
        yield server
        until(server.is_idle)


def exchange(server: Running, data: bytes, piece: int = 1 << 20) -> bytes:
    """Send bytes in pieces and return what comes back."""
    with connected(server.url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), piece):
            connection.sendall(data[start : start + piece])
        return read_all(connection)


def text_in(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


# ---- upgrades -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("piece", [1 << 20, 7, 1])
def test_an_upgrade_that_is_not_done_is_ignored_and_the_body_counts(
    plain: Running, is_chunked: bool, piece: int
) -> None:
    whole = asking(ASKED, more=H2C)
    first = in_chunks(whole, 9) if is_chunked else whole
    read = exchange(plain, first + request(more=H2C).replace(b"POST", b"GET") + asking(ASKED, more=CLOSE), piece)
    answers = answers_in(read)
    assert [status for status, _, _ in answers] == [200, 200, 200]
    assert json.loads(answers[1][2]) == {"status": "ok"}
    assert text_in(answers[0][2]) == text_in(answers[2][2]) == plain.text(**ASKED)
    assert not any("upgrade" in headers for _, headers, _ in answers)


def test_what_follows_headers_with_an_upgrade_is_never_read_as_a_request_of_its_own(plain: Running) -> None:
    inner = request()
    read = exchange(plain, request(path="/v1/completions", body=inner, more=JSON_TYPE + H2C) + request(more=CLOSE))
    assert [status for status, _, _ in answers_in(read)] == [400, 405], "a body that is no JSON, and a POST to /health"


def test_a_tunnel_is_refused(plain: Running) -> None:
    read = exchange(plain, b"CONNECT other.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answers_in(read)[0][0] == 400


# ---- HTTP/1.0 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_old_client_gets_a_plain_body_that_ends_with_the_connection(plain: Running, is_streamed: bool) -> None:
    read = exchange(plain, asking({**ASKED, "stream": is_streamed}, version="1.0"))
    head, _, body = read.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"chunked" not in head.lower()
    if not is_streamed:
        assert text_in(body) == plain.text(**ASKED)
        return
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert "".join(parts) == plain.text(**ASKED)


# ---- sides that are closed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_has_sent_all_and_closes_its_side_gets_its_answer(plain: Running, is_streamed: bool) -> None:
    with connected(plain.url) as connection:
        connection.sendall(asking({**ASKED, "max_tokens": 60, "ignore_eos": True, "stream": is_streamed}))
        connection.shutdown(socket.SHUT_WR)
        read = read_all(connection)
    while read.startswith(b"HTTP/1.1 100 "):
        read = read.partition(b"\r\n\r\n")[2]
    assert read.startswith(b"HTTP/1.1 200 ")
    if is_streamed:
        assert b"data: [DONE]" in read and read.endswith(b"0\r\n\r\n")
    else:
        assert json.loads(read.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("sends_more", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_is_gone_is_noticed_whatever_it_has_sent_since(
    plain: Running, is_streamed: bool, sends_more: bool, is_reset: bool
) -> None:
    before = plain.service.ledger.finished["abort"]
    with connected(plain.url) as connection:
        connection.sendall(asking({**LONG, "stream": is_streamed}) + (request() if sends_more else b""))
        until(lambda: len(plain.service.arrivals))
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(plain.is_idle)
    assert plain.service.ledger.finished["abort"] == before + 1, "not written to its end"


def test_all_requests_are_answered_that_were_sent_before_a_client_closed_its_side(plain: Running) -> None:
    with connected(plain.url) as connection:
        connection.sendall(asking(ASKED) * 3 + request(path="/v1/models") * 200 + asking(ASKED) + request()[:9])
        connection.shutdown(socket.SHUT_WR)
        answers = answers_in(read_all(connection))
    statuses = [status for status, _, _ in answers if status != 100]
    assert statuses == [200] * 204


def test_half_of_a_request_is_no_request(plain: Running) -> None:
    with connected(plain.url) as connection:
        connection.sendall(asking(ASKED)[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


# ---- answers that come early ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", CLOSE], ids=["kept", "closed"])
def test_who_sends_a_large_body_without_a_key_can_read_why_it_is_refused(plain: Running, more: str) -> None:
    body = b" " * 3_000_000
    with serving(plain.llm, api_keys=("secret",)) as guarded, connected(guarded.url) as connection:
        whole = request(path="/v1/completions", body=body, more=JSON_TYPE + more)
        connection.sendall(whole[:1000])
        until(lambda: guarded.service.ledger.errors[401])
        connection.sendall(whole[1000:])  # its answer, and perhaps the end of the connection, are there already
        connection.sendall(b"" if more else request(more=CLOSE).replace(b"POST", b"GET"))
        statuses = [status for status, _, _ in answers_in(read_all(connection))]
    assert statuses == ([401] if more else [401, 200])


# ---- many requests at once ------------------------------------------------------------------------------------------


def test_few_requests_are_read_before_they_are_answered_and_all_are_in_their_order(plain: Running) -> None:
    paths = ["/health", "/v1/models", "/load", "/nowhere"] * 300
    with connected(plain.url) as connection:
        connection.sendall(asking({**ASKED, "max_tokens": 200, "ignore_eos": True}))
        until(lambda: len(plain.service.arrivals))
        connection.sendall(b"".join(request(path=path) for path in paths) + request(more=CLOSE))
        until(lambda: any(one.pipeline for one in plain.connections))
        most = max(len(one.pipeline) for one in plain.connections)
        answers = answers_in(read_all(connection))
    assert most <= 4096 // len(request()) + 1
    assert [status for status, _, _ in answers] == [200] + [200, 200, 200, 404] * 300 + [405]


@pytest.mark.parametrize("piece", [b"a: b\r\n", b"a" * 100], ids=["many", "long"])
def test_headers_behind_a_body_are_bounded_too(plain: Running, piece: bytes) -> None:
    with connected(plain.url) as connection:
        connection.sendall(in_chunks(asking(ASKED), 100)[:-2])
        connection.settimeout(0.01)
        read = b""
        for _ in range(2000):
            try:
                connection.sendall(piece * 20)
                read += connection.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if b"\r\n\r\n" in read:
                break
    assert b"HTTP/1.1 431 " in read


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_large_body_arrives_whole_also_if_its_client_closes_its_side_behind_it(plain: Running, size: int) -> None:
    num_bytes = 300_000 if size == 1 else 3_000_000
    whole = asking({**ASKED, "user": "x" * num_bytes})
    for data in (whole, in_chunks(whole, size)):
        with connected(plain.url) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            *_, (status, _, body) = answers_in(read_all(connection))
        assert status == 200
        assert text_in(body) == plain.text(**ASKED)


def test_a_body_in_pieces_of_one_byte_is_a_body(plain: Running) -> None:
    assert answers_in(exchange(plain, in_chunks(asking(ASKED, more=CLOSE))))[0][0] == 200
