"""Whatever clients send to `card serve`, in whatever way: it costs them alone, and others are answered meanwhile."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.attacks.conftest import Book
from tests.attacks.health import Look, looking_at_health, told
from tests.attacks.http_bodies import MOST_BYTES, bodies
from tests.server.raw import JSON_TYPE, answers_in, asking, connected, in_chunks, read_all, request
from tests.server.running import PATIENCE_S, Command, command
from tests.waiting import until

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(300)]

HELD_S = 0.5  # that the server may compute while /health waits
MOST_GROWTH_BYTES = 20 * MOST_BYTES
HEAD_TIMEOUT_S = 3.0
SMALL = {"prompt": "Tom has 3 apples", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "Tom has 3 apples", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}


@dataclass(frozen=True)
class Since:
    """What was seen from some moment on."""

    looks: list[Look]
    growth: int  # of resident bytes
    num_small: int  # small requests that were answered

    @property
    def held_s(self) -> float:
        """What the server computed at most while /health waited."""
        return max(look.held_s for look in self.looks)

    def __str__(self) -> str:
        """All of it in words."""
        others = f"{self.num_small} of {self.num_small} others answered"
        return f"{told(self.looks)}; {self.growth / 1e6:.0f} MB more; {others}"


@dataclass
class Watched:
    """A server, what a process beside it sees of its health, and what came of small requests meanwhile."""

    server: Command
    looks: list[Look]
    small: list[tuple[float, int]] = field(default_factory=list)  # when, status

    @property
    def url(self) -> str:
        """The address."""
        return self.server.url

    def since(self, started_at: float) -> Since:
        """Tell what was seen since then, at least one look of which has begun after now."""
        now = time.monotonic()
        until(lambda: self.looks[-1].started_at > now)
        during = [look for look in self.looks if look.started_at + look.took_s >= started_at]
        before = [look.rss for look in self.looks if look.started_at < started_at][-1]
        statuses = [status for when, status in self.small if when >= started_at]
        assert all(status == 200 for status in statuses)
        return Since(during, max(look.rss for look in during) - before, len(statuses))


@contextlib.contextmanager
def watched(folder: Path, *options: str, before: str = "pass") -> Iterator[Watched]:
    """Serve the demo pair, with a probe and a client of small requests beside it."""
    with command(folder, "--policy", "fixed", "--threads", "1", *options, before=before) as server:
        is_over = threading.Event()
        with looking_at_health(server) as looks:
            seen = Watched(server, looks)

            def ask() -> None:
                with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
                    while not is_over.wait(0.05):
                        started_at = time.monotonic()
                        seen.small.append((started_at, client.post("/v1/completions", json=SMALL).status_code))

            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            try:
                until(lambda: len(seen.small) >= 3)
                yield seen
            finally:
                is_over.set()
                thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("attacked"), "--head-timeout", str(HEAD_TIMEOUT_S)) as server:
        yield server


def test_bodies_of_every_shape(attacked: Watched, book: Book) -> None:
    slowest, largest, longest, num_small = (0.0, ""), (0, ""), (0.0, ""), 0
    headers = {"Content-Type": "application/json"}
    shapes = bodies()
    with httpx2.Client(base_url=attacked.url, timeout=PATIENCE_S) as client:
        for body in shapes:
            assert len(body.data) <= MOST_BYTES, body.name
            started_at = time.monotonic()
            for _ in range(2):
                answer = client.post(body.path, content=body.data, headers=headers)
                assert answer.status_code in body.statuses, (body.name, answer.status_code, answer.text[:300])
                assert len(answer.content) < 2 * MOST_BYTES or body.path == "/tokenize", body.name
                if answer.status_code >= 400:
                    assert len(answer.content) < 1000, body.name
            took_s = (time.monotonic() - started_at) / 2
            since = attacked.since(started_at)
            print(f"{body.name:40} {len(body.data):8} {took_s:.2f} s; {since}")
            slowest, largest = max(slowest, (since.held_s, body.name)), max(largest, (since.growth, body.name))
            longest, num_small = max(longest, (took_s, body.name)), num_small + since.num_small
    book(
        f"bodies of up to 4 MiB in {len(shapes)} shapes",
        2 * len(shapes),
        f"answered in at most {longest[0]:.2f} s ({longest[1]}); "
        f"/health waits while the server computes {slowest[0]:.2f} s at most ({slowest[1]}); "
        f"memory at most {largest[0] / 1e6:.0f} MB more ({largest[1]}); {num_small} of {num_small} others answered",
    )
    assert slowest[0] < HELD_S, slowest
    assert largest[0] < MOST_GROWTH_BYTES, largest


def test_many_large_bodies_at_once(attacked: Watched, book: Book) -> None:
    shapes = [body for body in bodies() if len(body.data) > MOST_BYTES // 16 and body.path != "/tokenize"]
    headers = {"Content-Type": "application/json"}
    started_at = time.monotonic()
    with httpx2.Client(base_url=attacked.url, timeout=PATIENCE_S) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: client.post(body.path, content=body.data, headers=headers), shapes))
    for body, answer in zip(shapes, answers, strict=True):
        assert answer.status_code in (*body.statuses, 429), body.name
    since = attacked.since(started_at)
    book("eight such bodies at a time", len(shapes), str(since))
    assert since.held_s < 2 * HELD_S


def test_bodies_in_pieces_of_one_byte(attacked: Watched, book: Book) -> None:
    body = in_chunks(asking({**SMALL, "user": "x" * 2_000_000}, more="Connection: close\r\n"))
    started_at = time.monotonic()
    with connected(attacked.url) as connection:
        connection.sendall(body)
        (answer,) = answers_in(read_all(connection))
    assert answer[0] == 200
    since = attacked.since(started_at)
    book("2 MB in chunks of one byte", 1, f"200; {since}")
    assert since.held_s < HELD_S and since.growth < MOST_GROWTH_BYTES


@pytest.mark.parametrize("kind", ["many headers", "a long header", "headers behind a body", "a long one behind a body"])
def test_headers_without_end(attacked: Watched, book: Book, kind: str) -> None:
    begin = in_chunks(asking(SMALL), 100)[:-2] if "behind" in kind else request()[:-2]
    piece = b"x" * 65_536 if "long" in kind else b"a: b\r\n" * 10_000
    started_at, num_sent = time.monotonic(), 0
    for _ in range(10):
        read = b""
        with connected(attacked.url) as connection:
            connection.sendall(begin + (b"X-Long: " if "long" in kind else b""))
            while not read:
                assert num_sent < 1e9
                with contextlib.suppress(ConnectionError):
                    connection.sendall(piece)
                num_sent += len(piece)
                if select.select([connection], [], [], 0)[0]:
                    read = connection.recv(65536)
        assert read.startswith(b"HTTP/1.1 431 ")
    since = attacked.since(started_at)
    book(f"{kind} ({num_sent / 1e6:.0f} MB)", 10, f"431; {since}")
    assert since.held_s < HELD_S and since.growth < MOST_GROWTH_BYTES


def test_requests_sent_far_ahead(attacked: Watched, book: Book) -> None:
    ahead = request(path="/v1/models") * 20_000
    started_at = time.monotonic()
    with connected(attacked.url) as connection:
        connection.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            connection.sendall(asking(LONG) + ahead)
        time.sleep(2)
    since = attacked.since(started_at)
    book("requests sent ahead of an answer", 20_000, str(since))
    assert since.held_s < HELD_S and since.growth < MOST_GROWTH_BYTES


def test_readers_that_take_nothing_and_clients_that_leave(attacked: Watched, book: Book) -> None:
    started_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        for idx in range(100):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            host, port = attacked.url.removeprefix("http://").split(":")
            connection.connect((host, int(port)))
            connection.sendall(asking({**LONG, "max_tokens": 200, "stream": bool(idx % 4)}))
            if idx % 2:
                connection.close()
        time.sleep(3)
    load = httpx2.get(f"{attacked.url}/load")
    while load.json()["server_load"] > 2:
        time.sleep(0.05)
        load = httpx2.get(f"{attacked.url}/load")
    took_s = time.monotonic() - started_at
    since = attacked.since(started_at)
    book("streams that nobody reads, and clients that leave", 100, f"all gone after {took_s:.1f} s; {since}")
    assert since.held_s < HELD_S and since.growth < MOST_GROWTH_BYTES


def test_heads_and_bodies_that_never_come(attacked: Watched, book: Book) -> None:
    head = request(path="/v1/completions", more=f"{JSON_TYPE}Content-Length: 1000\r\n")
    starts = [b"", b"GET /hea", request()[:-2], head, head + b"{"]
    started_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connected(attacked.url)) for _ in range(400)]
        for idx, connection in enumerate(waiting):
            connection.sendall(starts[idx % len(starts)])
        ends = [read_all(waiting[idx])[:12] for idx in range(0, 400, 5)]
    assert ends == [b"HTTP/1.1 408"] * 80
    since = attacked.since(started_at)
    book("connections that send nothing, or half of a request", 400, f"408 after {HEAD_TIMEOUT_S:g} s; {since}")
    assert since.held_s < HELD_S


def test_more_connections_than_files(tmp_path: Path, book: Book) -> None:
    most = 1024
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {(most, most)})"
    with watched(tmp_path, "--head-timeout", str(HEAD_TIMEOUT_S), before=limit) as server:
        started_at = time.monotonic()
        files = psutil.Process(server.server.process.pid)
        with contextlib.ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(connected(server.url))
            time.sleep(1)
            num_files = files.num_fds()
        since = server.since(started_at)
        assert since.num_small and num_files < most - 100
        warnings = [line for line in server.server.logged() if line["level"] != "info"]
        assert [line["event"] for line in warnings] == ["few open files"]
    book("idle connections with 1,024 files", 1100, f"{num_files} files open of {most}; {since}")
    assert since.held_s < HELD_S
