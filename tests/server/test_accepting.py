"""No more connections than there are files for, and an end that can be seen if the engine dies."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import resource
import socket
from pathlib import Path

import httpx2
import psutil
import pytest

from card.server import accepting
from card.server.accepting import OTHER_FILES, room_for
from tests.pair import Pair
from tests.processes import has_ended
from tests.server.raw import answers_in, connected, read_all, request
from tests.server.running import PATIENCE_S, Running, command, serving
from tests.server.test_shutdown import Reader, all_are_gone, arguments, drafters_of, plain_arguments
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "room"),
    [
        (1024, 1024, 1024, 1024 - OTHER_FILES),
        (1024, 1 << 20, 1024, 1024),
        (256, resource.RLIM_INFINITY, 100, 100),
        (300, 300, 10, 10),
        (300, 300, 1024, 150),
    ],
)
def test_there_are_as_many_connections_as_files_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, soft: int, hard: int, wanted: int, room: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, changed: limits.append(changed))
    with caplog.at_level(logging.WARNING):
        assert room_for(wanted) == room
    assert len(caplog.records) == (room < wanted)
    assert limits[-1][0] >= room + min(OTHER_FILES, room)
    assert limits[-1][1] == hard


def test_idle_connections_leave_files_to_everyone_else(pair: Pair, tmp_path: Path) -> None:
    most_files, room = 200, 100
    options = (*plain_arguments(pair), "--head-timeout", "3")
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {(most_files, most_files)})"
    with command(tmp_path, *options, before=limit) as server, contextlib.ExitStack() as stack:
        files = psutil.Process(server.process.pid)
        others = files.num_fds()
        idle = [stack.enter_context(connected(server.url)) for _ in range(2 * most_files)]
        until(lambda: files.num_fds() >= others + room - 1)
        with connected(server.url) as one:
            ((status, headers, _),) = answers_in(read_all(one))
        assert (status, headers["connection"]) == (503, "close")
        assert files.num_fds() < most_files - 50, "the bound leaves more than the process needs"
        refused = [one for one in idle if read_all(one).startswith(b"HTTP/1.1 503 ")]
        assert len(refused) == len(idle) - room
        answer = httpx2.post(
            f"{server.url}/v1/completions", json={"prompt": "the", "max_tokens": 2}, timeout=PATIENCE_S
        )
        assert answer.status_code == 200
        (warning,) = [line for line in server.logged() if line["level"] != "info"]
        assert (warning["event"], warning["connections"]) == ("few open files", room)
        assert next(line for line in server.logged() if line["event"] == "ready")["max_connections"] == room


def test_a_system_without_files_is_not_asked_again_and_again(
    shared_server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "RETRY_S", 0.05)
    with serving(shared_server.llm) as server, contextlib.ExitStack() as waiting:
        asked: list[object] = []

        def full(self: socket.socket) -> object:
            asked.append(self)
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(socket.socket, "accept", full)
            one = waiting.enter_context(connected(server.url))
            until(lambda: len(asked) >= 3)
            assert len([line for line in caplog.records if line.name == "card.server.accepting"]) == 1
        one.sendall(request(more="Connection: close\r\n").replace(b"POST", b"GET"))
        assert read_all(one).startswith(b"HTTP/1.1 200 ")


def test_a_server_whose_engine_has_died_says_so_and_ends_with_a_status(pair: Pair, tmp_path: Path) -> None:
    options = (*arguments(pair), "--placement", "process")
    with command(tmp_path, *options, before="import tests.server.dying") as server:
        drafters = drafters_of(server)
        reader = Reader(server, 4000)
        assert server.process.wait(PATIENCE_S) == 1
        reader.join(PATIENCE_S)
        assert reader.failure is None
        assert reader.events[-1] == "[DONE]"
        assert reader.events[-2]["error"]["code"] == "engine_down"
        until(lambda: all_are_gone(drafters))
        assert all(has_ended(one.pid) for one in drafters)
        (line,) = [line for line in server.logged() if line["event"].startswith("the engine has died")]
        assert (line["level"], line["exception"], line["status"]) == ("error", "MemoryError", 1)
        assert "told to nobody" not in json.dumps(line), "messages may quote prompts"
