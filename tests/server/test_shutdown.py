"""`card serve` as a process: its options, its end by signals under load, and what it leaves behind: nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from card.server.serving import heard_signals
from tests.pair import Pair
from tests.processes import has_ended
from tests.server.raw import JSON_TYPE, answers_in, connected, read_all, request
from tests.server.running import PATIENCE_S, Command, command
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

KEY = "a-secret-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SECRET_PROMPT = "the cat knows a secret"


def arguments(pair: Pair) -> tuple[str, ...]:
    models = (pair.target, "--draft-model", pair.draft, "--dtype", "float32", "--alias", "tiny")
    return (*models, "--policy", "fixed", "--threads", "1")  # nothing is measured


def plain_arguments(pair: Pair) -> tuple[str, ...]:
    """Return the arguments of a server that drafts nothing."""
    return (pair.target, "--dtype", "float32", "--alias", "tiny", "--method", "vanilla", "--threads", "1")


class Reader(threading.Thread):
    """Reads one long stream from beginning to end."""

    def __init__(self, server: Command, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._server, self._max_tokens = server, max_tokens
        self.events: list[Any] = []
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        body = {"prompt": SECRET_PROMPT, "max_tokens": self._max_tokens, "ignore_eos": True, "stream": True}
        url = f"{self._server.url}/v1/completions"
        try:
            with httpx2.stream("POST", url, json=body, headers=HEADERS, timeout=PATIENCE_S) as response:
                for line in response.iter_lines():
                    if line and line != ":":  # a comment, which fills a long silence
                        data = line.removeprefix("data: ")
                        self.events.append(data if data == "[DONE]" else json.loads(data))
        except httpx2.HTTPError as error:
            self.failure = error


def has_begun(reader: Reader) -> bool:
    return bool(reader.events)


def drafters_of(server: Command) -> list[psutil.Process]:
    return [
        one for one in psutil.Process(server.process.pid).children(recursive=True) if "drafter" in str(one.cmdline())
    ]


def all_are_gone(processes: list[psutil.Process]) -> bool:
    return all(has_ended(one.pid) for one in processes)


@pytest.mark.parametrize(("num_readers", "num_tokens"), [(2, 1200), pytest.param(16, 1200, marks=pytest.mark.slow)])
def test_sigterm_under_load_lets_what_runs_finish_refuses_the_rest_and_leaves_nothing(
    pair: Pair, tmp_path: Path, num_readers: int, num_tokens: int
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("shutdown-timeout: 150\nmax-num-seqs: 4\n", "utf-8")
    extra = ("--config", str(config), "--placement", "process")
    with command(tmp_path, *arguments(pair), *extra, env={"CARD_API_KEY": KEY}) as server:
        drafters = drafters_of(server)
        assert len(drafters) == 1
        readers = [Reader(server, num_tokens) for _ in range(num_readers)]
        with httpx2.Client(base_url=server.url, headers=HEADERS, timeout=PATIENCE_S) as client:
            # Any of them: who comes first is chance, and the one that comes last begins when others have ended.
            until(lambda: client.get("/load").json()["server_load"] == num_readers and any(map(has_begun, readers)))
            server.process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/health/ready").status_code == 503)
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert any(reader.is_alive() for reader in readers), "they still run while the new one was refused"
        assert server.process.wait(2 * PATIENCE_S) == 0
        for reader in readers:
            reader.join(PATIENCE_S)
            assert reader.failure is None
            assert reader.events[-1] == "[DONE]"
            assert reader.events[-2]["choices"][0]["finish_reason"] == "length"
        until(lambda: all_are_gone(drafters))
        log = server.log.read_text("utf-8")
        assert KEY not in log and "secret" not in log, "neither keys nor prompts are logged"
        events = [event for line in server.logged() if not (event := line["event"]).endswith(" s)")]  # of a slow start
        assert events[0] == "ready" and events[-1] == "stopped"
        told = [line for line in server.logged() if line["event"] == "request" and line["status"] == 200]
        assert sorted(line["new_tokens"] for line in told if "new_tokens" in line) == [num_tokens] * num_readers
        assert next(line for line in server.logged() if line["event"] == "ready")["max_num_seqs"] == 4


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_cut_off_and_told_so(pair: Pair, tmp_path: Path) -> None:
    extra = ("--shutdown-timeout", "0.2", "--api-key", KEY, "--placement", "inline")
    with command(tmp_path, *arguments(pair), *extra) as server:
        reader = Reader(server, 4000)
        until(lambda: reader.events)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 0
        reader.join(PATIENCE_S)
        assert reader.failure is None
        assert reader.events[-1] == "[DONE]"
        assert reader.events[-2]["error"]["code"] == "shutting_down"


def test_a_second_signal_ends_the_server_at_once_and_its_drafter_too(pair: Pair, tmp_path: Path) -> None:
    extra = ("--shutdown-timeout", "600", "--api-key", KEY, "--placement", "process")
    with command(tmp_path, *arguments(pair), *extra) as server:
        drafters = drafters_of(server)
        reader = Reader(server, 4000)
        until(lambda: reader.events)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: has_said(server, "draining"))
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        until(lambda: all_are_gone(drafters))
        assert not [line for line in server.logged() if "died" in line["event"]], (
            "it was ended, and is not to be repaired"
        )
        reader.join(PATIENCE_S)
        assert reader.failure is not None or reader.events[-2]["error"]["code"] == "shutting_down"


SLOW = {"allOf": [{"type": "object", "properties": {"a": {"type": "string", "pattern": f"a{i}"}}} for i in range(50)]}
KEPT_TO_SLOW = {"type": "json_schema", "json_schema": {"name": "slow", "schema": SLOW}}


def begun(server: Command, stack: contextlib.ExitStack, body: bytes, sent: int) -> socket.socket:
    """Begin a request, and send a part of its body once the server reads it."""
    connection = stack.enter_context(connected(server.url))
    more = f"Authorization: Bearer {KEY}\r\nExpect: 100-continue\r\n"
    head, _, _ = request(path="/v1/completions", body=body, more=JSON_TYPE + more).partition(b"\r\n\r\n")
    connection.sendall(head + b"\r\n\r\n")
    assert connection.recv(100).startswith(b"HTTP/1.1 100")
    connection.sendall(body[:sent])
    return connection


def has_said(server: Command, event: str) -> bool:
    return any(line["event"] == event for line in server.logged())


@pytest.mark.parametrize(("limit_s", "number"), [("60", signal.SIGHUP), ("0.2", signal.SIGTERM)])
def test_a_request_counts_from_its_arrival_when_the_server_is_told_to_end(
    pair: Pair, tmp_path: Path, limit_s: str, number: signal.Signals
) -> None:
    pytest.importorskip("llguidance")
    asked = {"prompt": "the cat", "max_tokens": 2}
    plain, shaped = (json.dumps(one).encode() for one in (asked, {**asked, "response_format": KEPT_TO_SLOW}))
    extra = ("--shutdown-timeout", limit_s, "--api-key", KEY)
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # these tests may run under nohup
    with command(tmp_path, *plain_arguments(pair), *extra, before=heard) as server, contextlib.ExitStack() as stack:
        waiting = begun(server, stack, plain, 10), begun(server, stack, shaped, len(shaped))
        server.process.send_signal(number)
        until(lambda: has_said(server, "draining"))
        if limit_s == "60":
            waiting[0].sendall(plain[10:])
        answers = [answers_in(read_all(connection))[-1] for connection in waiting]
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.log.read_text("utf-8")
        told = [(status, json.loads(body).get("error", {}).get("code")) for status, _, body in answers]
        if limit_s == "60":
            assert [status for status, _ in told] == [200, 400], "both came to their own ends"
        else:
            assert told == [(503, "shutting_down")] * 2
            assert all(int(headers["retry-after"]) >= 1 for _, headers, _ in answers)


@pytest.mark.parametrize(("before", "is_heard"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_hang_up_is_heard_unless_the_server_was_started_to_outlive_its_terminal(
    monkeypatch: pytest.MonkeyPatch, before: object, is_heard: bool
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: before)
    heard = heard_signals()
    assert {signal.SIGINT, signal.SIGTERM} <= set(heard) and (signal.SIGHUP in heard) == is_heard


def test_a_schema_that_takes_minutes_delays_neither_others_nor_the_end(pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    with command(tmp_path, *plain_arguments(pair), "--grammar-timeout", "1") as server:
        url = f"{server.url}/v1/completions"
        asked = {"prompt": "the cat", "max_tokens": 2}
        refused = httpx2.post(url, json={**asked, "response_format": KEPT_TO_SLOW}, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "grammar_timeout")
        assert httpx2.post(url, json=asked, timeout=PATIENCE_S).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert server.logged()[-1]["event"] == "stopped"
