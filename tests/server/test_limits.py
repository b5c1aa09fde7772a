"""The gate, the deadline and the key ring by themselves, and a stuck engine seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.api import driver
from card.config import SamplingParams
from card.errors import WorkerError
from card.server.admission import KeyRing
from card.server.arrivals import Arrivals
from card.server.errors import ApiError, as_api_error, shutting_down
from card.server.limits import Deadline, Gate
from card.server.logs import JsonFormatter, log_event
from tests.examples import settings
from tests.reaching_in import driver_of
from tests.server.running import PROMPT, Running, run, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)


# ---- the gate -------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=40))
def test_the_gate_lets_in_whom_a_plain_count_would(steps: list[tuple[bool, int]]) -> None:
    async def main() -> None:
        gate, inside = Gate(max_running=3, max_waiting=4), []
        for enters, size in steps:
            if not enters:
                if inside:
                    gate.leave(inside.pop(0)[0])
                continue
            if sum(count for _, count in inside) + size <= 7:
                inside.append((gate.enter(size, "one"), size))
            else:
                with pytest.raises(ApiError) as refused:
                    gate.enter(size, "one")
                assert refused.value.status == 429
                assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
            assert gate.num_requests == len(inside)
        with pytest.raises(ApiError, match="at most 7 texts"):
            gate.enter(8, "one")

    asyncio.run(main())


def test_a_client_that_fills_the_queue_leaves_each_other_one_its_share() -> None:
    async def main() -> None:
        gate = Gate(max_running=4, max_waiting=12)
        inside = [gate.enter(4, "greedy") for _ in range(4)]
        for client, num_sequences in (("greedy", 1), ("second", 9)):
            with pytest.raises(ApiError, match="the queue is full"):
                gate.enter(num_sequences, client)
        gate.enter(8, "second")
        with pytest.raises(ApiError, match="the queue is full"):
            gate.enter(6, "third")
        gate.enter(5, "third")
        for ticket in inside:
            gate.leave(ticket)
        gate.enter(3, "second")
        with pytest.raises(ApiError, match="the queue is full"):
            gate.enter(1, "second")

    run(main())


def test_however_many_addresses_somebody_has_a_full_queue_gives_as_many_places_again_at_most() -> None:
    async def main() -> None:
        gate, num_inside = Gate(max_running=4, max_waiting=12), 16
        gate.enter(16, "greedy")
        for idx in range(200):  # each address in turn takes all that it gets
            with contextlib.suppress(ApiError):
                while True:
                    gate.enter(1, f"address {idx}")
                    num_inside += 1
        assert 16 < num_inside <= 32

    run(main())


def test_the_oldest_that_holds_much_memory_ends_and_nobody_else() -> None:
    async def main() -> None:
        arrivals, ended = Arrivals(60, 60, 1000), []

        async def answer(name: str) -> None:
            try:
                async with here[name].deadline:
                    await asyncio.Event().wait()
            except ApiError as error:
                ended.append((name, error.status, error.code))

        here = {name: arrivals.begin("one") for name in ("small", "old", "older than most", "new")}
        tasks = [asyncio.create_task(answer(name)) for name in here]
        await asyncio.sleep(0)
        for name, num_bytes in (("small", 10), ("new", 500), ("old", 300), ("older than most", 190)):
            arrivals.hold(here[name], num_bytes)
        await asyncio.sleep(0)
        assert not ended
        arrivals.hold(here["older than most"], 1)
        await asyncio.gather(tasks[1])
        assert ended == [("old", 503, "no_memory")]
        arrivals.hold(here["old"], 5000)
        arrivals.hold(here["new"], -400)
        arrivals.hold(here["small"], 600)
        arrivals.end(here["new"])
        await asyncio.sleep(0)
        assert len(ended) == 1, "what has ended holds nothing, and what is read or answered holds no more"
        for task in tasks:
            task.cancel()

    run(main())


def test_nobody_arrives_any_more_and_the_last_answer_empties_the_house() -> None:
    async def main() -> None:
        arrivals = Arrivals(60, 60, 1000)
        await arrivals.until_empty()
        arrival = arrivals.begin("one")
        arrivals.is_open = False
        with pytest.raises(ApiError) as refused:
            arrivals.begin("another")
        assert refused.value.status == 503
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(arrivals.until_empty(), 0.01)
        arrivals.end(arrival)
        await arrivals.until_empty()

    run(main())


# ---- the deadline ---------------------------------------------------------------------------------------------------


def test_a_deadline_ends_what_runs_too_long_and_what_is_cut_short() -> None:
    async def main() -> None:
        with pytest.raises(ApiError) as late:
            async with Deadline(0.01, 60):
                await asyncio.sleep(60)
        assert (late.value.status, late.value.code) == (503, "request_timeout")
        assert late.value.headers()["x-should-retry"] == "false"
        deadline = Deadline(60, 60)
        asyncio.get_running_loop().call_later(0.01, deadline.cut, shutting_down())
        with pytest.raises(ApiError, match="shutting down"):
            async with deadline:
                await asyncio.sleep(60)
        early = Deadline(60, 60)
        early.cut(shutting_down())
        with pytest.raises(ApiError, match="shutting down"):
            async with early:
                await asyncio.sleep(60)
        async with Deadline(60, 60):
            pass
        with pytest.raises(KeyError):
            async with Deadline(60, 60):
                raise KeyError

    run(main())


def test_an_answers_time_begins_with_its_first_token() -> None:
    async def main() -> None:
        deadline = Deadline(0.01, 60)
        async with deadline:
            deadline.begin_answer()
            await asyncio.sleep(0.05)
        short = Deadline(60, 0.01)
        with pytest.raises(ApiError, match=r"longer than the 0\.01 s"):
            async with short:
                short.begin_answer()
                await asyncio.sleep(60)
        cut = Deadline(60, 60)
        cut.cut(shutting_down())
        cut.begin_answer()
        with pytest.raises(ApiError, match="shutting down"):
            async with cut:
                await asyncio.sleep(60)

    run(main())


def test_the_time_to_the_first_token_has_a_bound_of_its_own(server: Running) -> None:
    asked = {"prompt": PROMPT * 40, "max_tokens": 2, "temperature": 0}
    with serving(server.llm, first_token_timeout_s=1e-6) as hasty:
        answer = hasty.post("/v1/completions", asked)
        assert answer.status_code == 503 and "no token within" in answer.text
        until(hasty.is_idle)


def test_a_request_that_takes_too_long_is_ended_with_its_reason(server: Running) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    with serving(server.llm, request_timeout_s=0.4, max_request_tokens=950) as hasty:
        answer = hasty.post("/v1/completions", asked)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "request_timeout"
        streamed = hasty.post("/v1/completions", {**asked, "stream": True}).text
        assert '"request_timeout"' in streamed and streamed.endswith("data: [DONE]\n\n")
        refused = hasty.post("/v1/completions", {**asked, "max_tokens": 951})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        until(hasty.is_idle)


# ---- keys and logs --------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(keys=st.lists(st.text(st.characters(codec="ascii", exclude_characters=" "), min_size=1), min_size=1, max_size=3),
       given_key=st.binary(max_size=12))  # fmt: skip
def test_a_key_ring_opens_to_its_own_keys_only(keys: list[str], given_key: bytes) -> None:
    ring = KeyRing(keys)
    headers = {b"authorization": b"Bearer " + given_key}
    if given_key.strip().decode("latin-1") in [key.strip() for key in keys] and given_key.strip():
        return  # a right one, perhaps with blanks around it
    with pytest.raises(ApiError) as refused:
        ring.check("/v1/models", headers)
    assert refused.value.status == 401
    assert all(key not in str(refused.value) for key in keys if len(key) > 3)
    ring.check("/health", headers)
    KeyRing([]).check("/v1/models", {})


def test_a_line_of_the_log_is_json_and_an_exception_keeps_its_words_to_itself() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    log_event(logger, logging.INFO, "request", status=200, path="/x")
    try:
        raise ValueError("what the prompt said")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["status"], first["path"], first["level"]) == ("request", 200, "/x", "info")
    assert second["exception"] == "ValueError"
    assert "test_a_line_of_the_log" in second["at"][0]
    assert "prompt" not in stream.getvalue()


# ---- health ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the engine hang in its next round until the event is set."""
    is_free, engine = threading.Event(), server.llm.host.engine
    step = engine.step

    def hang() -> object:
        if engine.has_work:
            is_free.wait(60)
        return step()

    monkeypatch.setattr(engine, "step", hang)
    yield is_free
    is_free.set()


@pytest.fixture
def looks_often(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the idle engine show signs of life often."""
    monkeypatch.setattr(driver, "IDLE_LOOK_S", 0.05)
    server.complete(prompt=PROMPT, max_tokens=1)  # it waits for as long as before until it has had something to do


def test_an_engine_that_hangs_with_work_is_alive_but_not_ready(
    server: Running, looks_often: None, stuck: threading.Event
) -> None:
    with serving(server.llm, stall_timeout_s=0.7) as watched:
        time.sleep(1.0)
        until(lambda: watched.client.get("/health/ready").status_code == 200)  # idling is no hanging
        answers: list[int] = []
        asked = {"prompt": PROMPT, "max_tokens": 2}
        asker = threading.Thread(target=lambda: answers.append(watched.post("/v1/completions", asked).status_code))
        asker.start()
        until(lambda: watched.client.get("/health/ready").status_code == 503)
        told = watched.client.get("/health/ready").json()
        assert told["error"]["code"] == "stuck"
        assert watched.client.get("/health").status_code == 200
        assert watched.client.get("/load").json()["server_load"] == 1
        stuck.set()
        asker.join(60)
        assert answers == [200]
        until(lambda: watched.client.get("/health/ready").status_code == 200)


def test_a_dead_engine_is_neither_alive_nor_ready(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise WorkerError("the engine's thread has died of Fault: x")

    monkeypatch.setattr(driver_of(server.llm), "check_alive", dead)
    for path in ("/health", "/health/ready"):
        assert server.client.get(path).status_code == 503
    answer = server.post("/v1/completions", {"prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
    assert "retry-after" in answer.headers
    assert "card_engine_up" in server.client.get("/metrics").text
    monkeypatch.undo()


def test_a_fault_of_our_own_is_an_answer_and_the_next_request_works(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.service, "check_model", lambda name: 1 / 0)
        answer = server.post("/v1/completions", {"prompt": PROMPT})
    assert answer.status_code == 500
    assert "division" not in answer.text
    assert answer.headers["x-request-id"]
    assert server.complete(prompt=PROMPT, max_tokens=1)


def test_settings_errors_name_the_field_of_the_request() -> None:
    for changes, param in (({"top_p": 2.0}, "top_p"), ({"min_tokens": 5, "max_tokens": 1}, "min_tokens")):
        with pytest.raises(ValueError) as wrong:
            SamplingParams(**changes)
        assert as_api_error(wrong.value).param == param
