"""Memory that waits for clients has one budget, whatever they keep the server waiting with."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from card.api.mailbox import logprob_bytes
from tests.server.raw import JSON_TYPE, answers_in, asking, connected, read_all, request
from tests.server.running import PROMPT, Running, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

KEYS = ("one", "other")
BODY_BYTES = 4096  # at most; 64 times as many are held for all clients


@pytest.fixture
def small(server: Running) -> Iterator[Running]:
    with serving(server.llm, max_request_bytes=BODY_BYTES, api_keys=KEYS) as small:
        yield small
        until(small.is_idle)


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def hardly_reading(server: Running, sent: bytes) -> Iterator[socket.socket]:
    """Send a request, and read nothing of the answer before the block does."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        own = connection.getsockname()
        until(lambda: own in [one.transport.get_extra_info("peername") for one in server.connections])
        [at] = [one for one in server.connections if one.transport.get_extra_info("peername") == own]
        at.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.sendall(sent)
        connection.settimeout(60)
        yield connection


def test_of_bodies_that_do_not_end_the_oldest_gives_way(small: Running) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode().ljust(BODY_BYTES)
    begun = request(path="/v1/completions", body=body, more=f"{JSON_TYPE}Authorization: Bearer one\r\n")[:-1]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(small.url))
        first.sendall(begun)
        until(lambda: len(small.service.arrivals) == 1)
        others = [stack.enter_context(connected(small.url)) for _ in range(64)]
        for one in others:
            one.sendall(begun)
        [(status, headers, told)] = answers_in(first.recv(65536))
        assert (status, json.loads(told)["error"]["code"]) == (503, "no_memory")
        assert int(headers["retry-after"]) >= 1
        until(lambda: len(small.service.arrivals) == len(others))
        for one in others:
            one.sendall(b" ")
            [(status, _, _)] = answers_in(one.recv(65536))
            assert status in (200, 429), "it was read to its end"


@pytest.mark.parametrize("n", [1, 4])
def test_a_stream_that_nobody_reads_ends_and_those_that_are_read_go_on(small: Running, n: int) -> None:
    # All of the short answer is less than half of what may be held: the event loop may stand still while it is written.
    num_tokens = 40 // n
    assert n * logprob_bytes(num_tokens, 20) < 64 * BODY_BYTES / 2
    short = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "logprobs": 20, "n": n}
    long = {**short, "max_tokens": 300}
    with hardly_reading(small, asking(long, more="Authorization: Bearer one\r\n")) as connection:
        with small.client.stream("POST", "/v1/completions", json=short, headers=with_key("other")) as read:
            assert read.read().endswith(b"data: [DONE]\n\n")
        assert read.content.count(b'"finish_reason":"length"') == n
        assert b"error" not in read.content
        until(lambda: small.service.gate.num_requests == 0)
        unread = read_all(connection)
        assert b"no_memory" in unread and b'"finish_reason":"length"' not in unread


def test_log_probabilities_of_prompts_count_until_they_are_sent(small: Running) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 20}
    answer = small.post("/v1/completions", asked, headers=with_key("one"))
    assert answer.status_code == 200
    answer = small.post("/v1/completions", {**asked, "prompt": [PROMPT] * 12}, headers=with_key("one"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_memory")


def test_a_queue_that_one_client_fills_takes_another_one(server: Running) -> None:
    room = server.llm.host.settings.max_num_seqs
    long = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True, "n": room}
    short = {"prompt": PROMPT, "max_tokens": 1}
    with serving(server.llm, api_keys=KEYS, max_num_queued_reqs=0) as full:
        with hardly_reading(full, asking(long, more="Authorization: Bearer one\r\n")):
            until(lambda: full.service.gate.num_requests == 1)
            refused = full.post("/v1/completions", short, headers=with_key("one"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert full.post("/v1/completions", short, headers=with_key("other")).status_code == 200
        until(full.is_idle)
