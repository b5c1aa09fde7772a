"""Whatever clients send to `card serve`, in whatever way: it costs them alone, and others are answered meanwhile."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
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
from tests.attacks.http_bodies import MOST_BYTES, bodies
from tests.server.raw import JSON_TYPE, answers_in, asking, connected, in_chunks, read_all, request
from tests.server.running import PATIENCE_S, Command, command

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(300)]

HEALTH_S = 0.5  # on a machine that others use as well; 0.2 s where nobody does
MOST_GROWTH_BYTES = 20 * MOST_BYTES
HEAD_TIMEOUT_S = 3.0
SMALL = {"prompt": "Tom has 3 apples", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "Tom has 3 apples", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}


@dataclass
class Watched:
    """A server, what a process beside it sees of its health, and what came of small requests meanwhile."""

    server: Command
    samples: list[tuple[float, float, int]] = field(default_factory=list)  # when, seconds of /health, resident bytes
    small: list[tuple[float, int]] = field(default_factory=list)  # when, status

    @property
    def url(self) -> str:
        """The address."""
        return self.server.url

    def since(self, started_at: float) -> tuple[float, int, int]:
        """Return the longest answer of /health, the growth in bytes, and how many small requests were answered."""
        time.sleep(0.1)
        during = [one for one in self.samples if one[0] + one[1] >= started_at]
        before = [rss for when, _, rss in self.samples if when < started_at][-1]
        statuses = [status for when, status in self.small if when >= started_at]
        assert all(status == 200 for status in statuses)
        return max(took for _, took, _ in during), max(rss for _, _, rss in during) - before, len(statuses)


@contextlib.contextmanager
def watched(folder: Path, *options: str, before: str = "pass") -> Iterator[Watched]:
    """Serve the demo pair, with a probe and a client of small requests beside it."""
    with command(folder, "--policy", "fixed", "--threads", "1", *options, before=before) as server:
        seen = Watched(server)
        host, port = server.url.removeprefix("http://").split(":")
        script = Path(__file__).with_name("probe.py")
        arguments = [sys.executable, str(script), host, port, str(server.process.pid)]
        probe = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        is_over = threading.Event()

        def read() -> None:
            assert probe.stdout is not None
            for line in probe.stdout:
                when, took, rss = line.split()
                seen.samples.append((float(when), float(took), int(rss)))

        def ask() -> None:
            with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
                while not is_over.wait(0.05):
                    started_at = time.monotonic()
                    seen.small.append((started_at, client.post("/v1/completions", json=SMALL).status_code))

        threads = [threading.Thread(target=one, daemon=True) for one in (read, ask)]
        for thread in threads:
            thread.start()
        while len(seen.samples) < 20 or len(seen.small) < 3:
            time.sleep(0.02)
        yield seen
        is_over.set()
        assert probe.poll() is None, "it was answered to the end"
        assert probe.stdin is not None
        probe.stdin.close()
        assert probe.wait(PATIENCE_S) == 0
        for thread in threads:
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
            health_s, growth, answered = attacked.since(started_at)
            print(f"{body.name:40} {len(body.data):8} {took_s:.2f} s, /health {health_s:.3f} s, {growth / 1e6:.0f} MB")
            slowest, largest = max(slowest, (health_s, body.name)), max(largest, (growth, body.name))
            longest, num_small = max(longest, (took_s, body.name)), num_small + answered
    book(
        f"bodies of up to 4 MiB in {len(shapes)} shapes",
        2 * len(shapes),
        f"answered in at most {longest[0]:.2f} s ({longest[1]}); /health at most {slowest[0]:.3f} s ({slowest[1]}); "
        f"memory at most {largest[0] / 1e6:.0f} MB more ({largest[1]}); {num_small} of {num_small} others answered",
    )
    assert slowest[0] < HEALTH_S, slowest
    assert largest[0] < MOST_GROWTH_BYTES, largest


def test_many_large_bodies_at_once(attacked: Watched, book: Book) -> None:
    shapes = [body for body in bodies() if len(body.data) > MOST_BYTES // 16 and body.path != "/tokenize"]
    headers = {"Content-Type": "application/json"}
    started_at = time.monotonic()
    with httpx2.Client(base_url=attacked.url, timeout=PATIENCE_S) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: client.post(body.path, content=body.data, headers=headers), shapes))
    for body, answer in zip(shapes, answers, strict=True):
        assert answer.status_code in (*body.statuses, 429), body.name
    health_s, growth, answered = attacked.since(started_at)
    result = f"/health at most {health_s:.3f} s; {growth / 1e6:.0f} MB more; {answered} of {answered} others answered"
    book("eight such bodies at a time", len(shapes), result)
    assert health_s < 2 * HEALTH_S


def test_bodies_in_pieces_of_one_byte(attacked: Watched, book: Book) -> None:
    body = in_chunks(asking({**SMALL, "user": "x" * 2_000_000}, more="Connection: close\r\n"))
    started_at = time.monotonic()
    with connected(attacked.url) as connection:
        connection.sendall(body)
        (answer,) = answers_in(read_all(connection))
    assert answer[0] == 200
    health_s, growth, _ = attacked.since(started_at)
    result = f"200; /health at most {health_s:.3f} s; {growth / 1e6:.0f} MB more"
    book("2 MB in chunks of one byte", 1, result)
    assert health_s < HEALTH_S and growth < MOST_GROWTH_BYTES


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
    health_s, growth, _ = attacked.since(started_at)
    result = f"431; /health at most {health_s:.3f} s; {growth / 1e6:.0f} MB more"
    book(f"{kind} ({num_sent / 1e6:.0f} MB)", 10, result)
    assert health_s < HEALTH_S and growth < MOST_GROWTH_BYTES


def test_requests_sent_far_ahead(attacked: Watched, book: Book) -> None:
    ahead = request(path="/v1/models") * 20_000
    started_at = time.monotonic()
    with connected(attacked.url) as connection:
        connection.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            connection.sendall(asking(LONG) + ahead)
        time.sleep(2)
    health_s, growth, answered = attacked.since(started_at)
    result = f"/health at most {health_s:.3f} s; {growth / 1e6:.0f} MB more; {answered} of {answered} others answered"
    book("requests sent ahead of an answer", 20_000, result)
    assert health_s < HEALTH_S and growth < MOST_GROWTH_BYTES


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
    health_s, growth, answered = attacked.since(started_at)
    took_s = time.monotonic() - started_at
    result = (
        f"all gone after {took_s:.1f} s; /health at most {health_s:.3f} s; {answered} of {answered} others answered"
    )
    book("streams that nobody reads, and clients that leave", 100, result)
    assert health_s < HEALTH_S and growth < MOST_GROWTH_BYTES


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
    health_s, _, answered = attacked.since(started_at)
    result = (
        f"408 after {HEAD_TIMEOUT_S:g} s; /health at most {health_s:.3f} s; {answered} of {answered} others answered"
    )
    book("connections that send nothing, or half of a request", 400, result)
    assert health_s < HEALTH_S


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
        health_s, _, answered = server.since(started_at)
        assert answered and num_files < most - 100
        warnings = [line for line in server.server.logged() if line["level"] != "info"]
        assert [line["event"] for line in warnings] == ["few open files"]
    result = (
        f"{num_files} files open of {most}; /health at most {health_s:.3f} s; {answered} of {answered} others answered"
    )
    book("idle connections with 1,024 files", 1100, result)
    assert health_s < HEALTH_S
