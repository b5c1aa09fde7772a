"""Many clients at once, too many, ones that leave, and a drafter that dies under them: same texts, nobody forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from card.links.process import ProcessLink
from card.models.demo import DEMO_PROBLEMS
from tests.processes import has_ended
from tests.reaching_in import watch_of
from tests.server.raw import asking, connected
from tests.server.running import MAX_QUEUED, PATIENCE_S, PROMPT, Running, Solo, run, scraped, streams
from tests.waiting import until

pytestmark = pytest.mark.timeout(280)

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}


def requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests of eight kinds: different prompts and lengths, greedy and sampled."""
    kinds = [
        {
            "prompt": DEMO_PROBLEMS[i][: 40 + 10 * i],
            "max_tokens": max_tokens - i % 3,
            "temperature": float(i % 2),
            "seed": i,
        }
        for i in range(8)
    ]
    return [kinds[i % 8] for i in range(count)]


def expected(solo: Solo, asked: dict[str, Any]) -> str:
    return solo(asked["prompt"], asked["max_tokens"], temperature=asked["temperature"], seed=asked["seed"])


def check_crowd(server: Running, solo: Solo, asked: list[dict[str, Any]]) -> None:
    for one, read in zip(asked, streams(server.url, COMPLETIONS, asked), strict=True):
        assert read.text == expected(solo, one)
        assert read.is_done and read.finish_reason and read.error is None


def test_sixty_four_streaming_clients_get_the_texts_of_solo_runs(server: Running, solo: Solo) -> None:
    check_crowd(server, solo, requests(64, max_tokens=8))


@pytest.mark.slow
def test_sixty_four_streaming_clients_get_the_texts_of_solo_runs_at_length(server: Running, solo: Solo) -> None:
    check_crowd(server, solo, requests(64, max_tokens=100))


def test_beyond_the_queue_requests_are_refused_and_the_accepted_ones_finish(server: Running, solo: Solo) -> None:
    room = server.llm.host.settings.max_num_seqs + MAX_QUEUED
    whole = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0, "seed": 0, "n": 8}

    async def main() -> list[httpx2.Response]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client:
            return list(await asyncio.gather(*(client.post(COMPLETIONS, json=whole) for _ in range(room // 8 + 6))))

    answers = run(main())
    accepted = [one for one in answers if one.status_code == 200]
    refused = [one for one in answers if one.status_code != 200]
    assert len(accepted) >= room // 8
    assert refused
    for one in refused:
        assert one.status_code == 429
        assert 1 <= int(one.headers["retry-after"]) <= 60
        assert one.json()["error"]["code"] == "queue_full"
    for one in accepted:
        assert [choice["text"] for choice in one.json()["choices"]] == [solo(PROMPT, 4)] * 8
    too_many = {"prompt": [PROMPT] * (room + 1), "max_tokens": 1}
    assert server.post(COMPLETIONS, too_many).status_code == 400


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_hang_up_free_their_places(server: Running, solo: Solo, is_streamed: bool) -> None:
    num_clients = server.llm.host.settings.max_num_seqs + 8  # some of them still wait

    async def ask_and_leave(client: httpx2.AsyncClient) -> None:
        body = {**LONG, "stream": is_streamed}
        if not is_streamed:
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(COMPLETIONS, json=body, timeout=httpx2.Timeout(PATIENCE_S, read=1.0))
            return
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            await asyncio.sleep(0.5)

    async def main() -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client:
            await asyncio.gather(*(ask_and_leave(client) for _ in range(num_clients)))

    run(main())
    until(server.is_idle)
    assert server.text(prompt=PROMPT, max_tokens=8, temperature=0) == solo(PROMPT, 8)


def test_a_client_that_leaves_while_its_prompt_is_scored_frees_its_place(server: Running) -> None:
    body = {"prompt": [[5 + i % 90] * 1000 for i in range(30)], "max_tokens": 0, "echo": True, "logprobs": 0}
    with pytest.raises(httpx2.ReadTimeout):
        server.client.post(COMPLETIONS, json=body, timeout=httpx2.Timeout(PATIENCE_S, read=0.5))
    until(server.is_idle)


def test_clients_that_leave_while_their_prompts_are_read_cost_the_others_nothing(server: Running, solo: Solo) -> None:
    num_before = scraped(server)["card_prompt_tokens_total", ""]
    for idx in range(24):
        prompt = [5 + (idx + place) % 90 for place in range(900)]
        with connected(server.url) as connection:
            connection.sendall(asking({"prompt": prompt, "max_tokens": 100, "stream": idx % 2 == 0}))
            if idx % 4 < 2:  # with a reset; the others close as a client does that has all it wants
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if idx % 6 == 0:
            assert server.text(prompt=PROMPT, max_tokens=8, temperature=0) == solo(PROMPT, 8)
    until(server.is_idle)
    assert scraped(server)["card_prompt_tokens_total", ""] > num_before
    assert server.text(prompt=PROMPT, max_tokens=8, temperature=0) == solo(PROMPT, 8)


# ---- drafters that fail ---------------------------------------------------------------------------------------------


def link_of(server: Running) -> ProcessLink:
    link = server.llm.host.link
    assert isinstance(link, ProcessLink)
    return link


@pytest.fixture
def link(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLink]:
    """The drafter's link; it takes a silent drafter for hung soon once `strike` has been called.

    At the end its drafter is up again: one that starts during a later test would look as if that had left it.
    """
    link = link_of(server)

    def is_up() -> bool:
        return link.pid is not None and link.status.state == "up"

    until(is_up)
    monkeypatch.setattr(watch_of(link), "silence_timeout_s", watch_of(link).silence_timeout_s)  # put back at the end
    yield link
    until(is_up)


def strike(link: ProcessLink, number: signal.Signals) -> None:
    """Send the drafter a signal, and be impatient from then on: on a busy machine a healthy one may be silent too."""
    if (pid := link.pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        watch_of(link).silence_timeout_s = 1.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_drafter_that_dies_under_load_costs_no_request_and_no_word(
    server: Running, solo: Solo, link: ProcessLink, number: signal.Signals
) -> None:
    pid, num_restarts = link.pid, link.status.num_restarts
    assert pid is not None
    trouble = threading.Timer(0.3, strike, (link, number))
    trouble.start()
    while link.status.num_restarts == num_restarts:
        check_crowd(server, solo, requests(8, max_tokens=24))
    trouble.join()
    assert has_ended(pid)
    check_crowd(server, solo, requests(4, max_tokens=24))


@pytest.mark.slow
def test_drafters_that_die_again_and_again_cost_no_request_and_no_word(
    server: Running, solo: Solo, link: ProcessLink
) -> None:
    rng, is_over = random.Random(1), threading.Event()

    def trouble() -> None:
        while not is_over.wait(rng.uniform(0.5, 3.0)):
            strike(link, rng.choice([signal.SIGKILL, signal.SIGSTOP]))

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            check_crowd(server, solo, requests(32, max_tokens=60))
    finally:
        is_over.set()
        thread.join()
    assert link.status.num_restarts > 2
