"""Soak and chaos: whatever befalls the drafter, every text is that of plain decoding and nothing is left behind.

Each test has a short form, and a long one of 2,000 requests that is marked slow; ``-s`` shows what happened in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq

from card.api.async_llm import AsyncLLM
from card.backends.transformers.loading import load_model
from card.links import zmq_link
from card.links.process import ProcessLink
from card.models.runners import plain_runner
from tests.chaos.crowd import MANNERS, Crowd
from tests.chaos.forgery import noise
from tests.chaos.jobs import Alone, Jobs, Outcome
from tests.chaos.real import (
    DTYPE,
    END_IDS,
    FIRST_TOKEN,
    MAX_MODEL_LEN,
    SPARE_TENSORS,
    ProcessWorld,
    ServerThread,
    ServerWorld,
    host_settings,
)
from tests.chaos.soak import (
    CONCURRENCY,
    Resources,
    Soak,
    World,
    check_flat,
    check_idle,
    check_nothing_is_left,
)
from tests.chaos.unreliable import VOCAB_SIZE, UnreliableWorld, sound_target
from tests.links.serving import RawClient, connected, make_server, running
from tests.pair import Pair
from tests.reaching_in import socket_of, sockets_of
from tests.unreliable_link import Faults
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)
LONG = (pytest.mark.slow, pytest.mark.timeout(3600))  # a busy machine took half an hour for most of it

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
GENTLE = ["pause", "kill"]
HARSH = [
    *("kill", "pause", "freeze", "noise from the drafter", "noise to the drafter"),
    *("frame of another incarnation", "order that cannot be followed", "offence"),
] * 4


def sizes(short: int) -> pytest.MarkDecorator:
    long = pytest.param(2000, id="long", marks=LONG)
    return pytest.mark.parametrize("num_requests", [pytest.param(short, id="short"), long])


def tell(started: float, outcomes: Sequence[Outcome], troubles: Counter[str], **more: object) -> None:
    """Print what happened, for those who want to know."""
    reasons = Counter(outcome.reason for outcome in outcomes)
    accepted = sum(outcome.accepted_tokens for outcome in outcomes)
    print(
        f"\n{len(outcomes)} requests in {time.monotonic() - started:.1f} s: {dict(reasons)}, {accepted} tokens accepted"
    )
    print(f"{sum(troubles.values())} troubles: {dict(troubles)}")
    for name, value in more.items():
        print(f"{name}: {value}")


def weather(world: World, jobs: Jobs, num_requests: int, *, must_accept: bool = True) -> Soak:
    """Run a calm fifth of the requests, then the others in a storm, then some more in the calm after it."""
    started = time.monotonic()
    soak = Soak(world, jobs)
    world.is_calm = True
    soak.run(num_requests // 5)
    soak.recover(must_accept=must_accept)
    world.engine.forget_prefixes()
    warm = Resources.now()
    world.is_calm = False
    soak.run(num_requests - num_requests // 5)
    soak.recover(must_accept=must_accept)
    check_idle(world.engine)
    after = Resources.now()
    tell(started, soak.outcomes, world.troubles, warm=warm, after=after, rounds=world.engine.stats().rounds)
    check_flat(warm, after, spare_trees=world.spare_trees, spare_tensors=world.spare_tensors)
    return soak


@pytest.fixture(autouse=True)
def keeps_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Keep no records of failures: the tracebacks in them hold requests, and it is checked that none is left."""
    caplog.set_level(logging.CRITICAL, "card")


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Alone:
    """The target of the pair. It has answered something already, so that what torch keeps is there before a test."""
    target = load_model(pair.target, dtype=DTYPE, device="cpu")
    answers = Alone(plain_runner(target, max_model_len=MAX_MODEL_LEN), END_IDS)
    answers.answer(Jobs(random.Random(0), target.config.vocab_size, first_token=FIRST_TOKEN).draw())
    return answers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lost drafters be replaced almost at once."""
    monkeypatch.setattr(zmq_link, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(zmq_link, "MAX_BACKOFF_S", 0.1)


@pytest.fixture
def leaves_nothing(alone: Alone, impatient: None) -> Iterator[None]:
    """Check that the test closes all that it opens."""
    before = Resources.now()
    yield
    check_nothing_is_left(before)


@sizes(150)
@pytest.mark.parametrize("drop", [pytest.param(0.0, id="disorder", marks=LONG), pytest.param(0.2, id="losses")])
def test_a_failing_target_and_a_treacherous_drafter_change_no_text(num_requests, drop):
    rng = random.Random(1)
    world = UnreliableWorld(rng, Faults(seed=2, drop=drop, duplicate=0.2, max_delay=3))
    soak = weather(world, Jobs(rng, VOCAB_SIZE, first_token=1), num_requests)
    Alone(sound_target(), world.end_ids).judge(soak.outcomes)
    reasons = Counter(outcome.reason for outcome in soak.outcomes)
    assert all(reasons[reason] for reason in ("stop", "length", "abort", "error"))
    assert world.troubles["failed pass"] and world.troubles["failed sequence"] and world.troubles["killed"]
    assert world.target.num_open == 0
    assert world.link.num_requests <= world.spare_trees


@pytest.mark.parametrize(
    ("num_requests", "troubles"),
    [pytest.param(60, GENTLE, id="short", marks=pytest.mark.slow), pytest.param(2000, HARSH, id="long", marks=LONG)],
)
def test_killed_and_stopped_drafter_processes_change_no_text(num_requests, troubles, pair, alone, leaves_nothing):
    rng = random.Random(3)
    world = ProcessWorld(pair, rng, troubles, placement="process", policy="fixed")
    try:
        soak = weather(world, Jobs(rng, world.vocab_size, first_token=FIRST_TOKEN), num_requests)
        world.is_calm = False
        while world.planned:  # on a busy machine the storm may be over before a drafter is back
            soak.run(num_requests)
        world.strike("noise to the drafter")
        soak.run(10)  # which end before the next drafter is there
    finally:
        world.close()
    alone.judge(soak.outcomes)


@sizes(50)
def test_a_draft_server_that_comes_and_goes_changes_no_text(num_requests, pair, alone, leaves_nothing):
    rng = random.Random(4)
    world = ServerWorld(pair, rng, policy="fixed")
    try:
        soak = weather(world, Jobs(rng, world.vocab_size, first_token=FIRST_TOKEN), num_requests)
    finally:
        world.close()
    alone.judge(soak.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(NUM_CORES < 2, reason="there is one core: no drafter beside the target")
def test_an_engine_that_tunes_itself_gives_the_same_text_in_a_storm(pair, alone, leaves_nothing):
    rng = random.Random(5)
    world = ProcessWorld(pair, rng, HARSH)
    try:
        soak = weather(world, Jobs(rng, world.vocab_size, first_token=FIRST_TOKEN), 2000, must_accept=False)
    finally:
        world.close()
    alone.judge(soak.outcomes)


# ---- many readers ---------------------------------------------------------------------------------------------------


async def answer_a_crowd(
    crowd: Crowd, harm: Callable[[], Awaitable[None]], num_requests: int, troubles: Counter[str]
) -> None:
    """Do as `weather` does, with readers that come and go; end what they read from."""
    started = time.monotonic()
    try:
        await crowd.run(num_requests // 5)
        await crowd.is_idle()
        warm = Resources.now()
        await crowd.run(num_requests - num_requests // 5, harm)
        await crowd.is_idle()
        after = Resources.now()
        tell(started, crowd.outcomes, troubles, manners=Counter(crowd.manners), warm=warm, after=after)
        assert set(crowd.manners) == set(MANNERS)
        check_flat(warm, after, spare_trees=CONCURRENCY, spare_tensors=SPARE_TENSORS)
    finally:
        await crowd.llm.shutdown()


@sizes(40)
def test_readers_who_come_and_go_while_the_draft_server_does_too_get_the_same_text(
    num_requests, pair, alone, leaves_nothing
):
    server, rng, troubles = ServerThread(pair), random.Random(6), Counter()

    async def harm() -> None:
        kind = rng.choice(["server killed", "server stopped", "noise of a stranger"])
        troubles[kind] += 1
        if kind == "server killed":
            server.kill()
        elif kind == "server stopped":
            server.is_paused = True
        else:
            with RawClient(server.address) as stranger:
                stranger.send(noise(rng, 1))
        await asyncio.sleep(rng.uniform(0.0, 0.03))
        server.restore()
        await asyncio.sleep(rng.uniform(0.0, 0.1))

    try:
        llm = AsyncLLM(pair.target, None, **host_settings(draft_address=server.address, policy="fixed"))
        crowd = Crowd(llm, Jobs(rng, alone.vocab_size, first_token=FIRST_TOKEN), pause_s=lambda: 0.005)
        asyncio.run(answer_a_crowd(crowd, harm, num_requests, troubles))
        until(lambda: server.num_requests == 0)
    finally:
        server.restore()
        server.kill()
    alone.judge(crowd.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readers_who_come_and_go_while_drafter_processes_die_get_the_same_text(pair, alone, leaves_nothing):
    rng, troubles = random.Random(7), Counter()
    llm = AsyncLLM(pair.target, pair.draft, **host_settings(placement="process", policy="fixed"))
    link: Any = llm.host.link
    assert isinstance(link, ProcessLink)

    async def harm() -> None:
        pid, number = link.pid, rng.choice([signal.SIGKILL, signal.SIGSTOP])
        if pid is None or link.status.state != "up":
            await asyncio.sleep(0.05)
            return
        troubles[number.name] += 1
        os.kill(pid, number)
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        if link.pid == pid:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(rng.uniform(0.0, 1.0))

    def pause_s() -> float:
        return 0.02 if link.status.state == "up" else 0.5

    crowd = Crowd(llm, Jobs(rng, alone.vocab_size, first_token=FIRST_TOKEN), pause_s)
    asyncio.run(answer_a_crowd(crowd, harm, 2000, troubles))
    alone.judge(crowd.outcomes)


# ---- what the storm has taught --------------------------------------------------------------------------------------


def test_no_socket_uses_the_heartbeats_of_zeromq_which_abort_the_process_if_a_peer_leaves_behind_a_full_queue():
    with running(make_server(sound_target())) as server, connected(server.address, vocab_size=VOCAB_SIZE) as link:
        for socket in (*sockets_of(server), socket_of(link)):
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
