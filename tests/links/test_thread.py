"""A drafter in a thread: same text, and whatever happens to the thread, the target goes on alone."""

from __future__ import annotations

import threading
import time

import pytest

from card.config import DraftSettings, SamplingParams
from card.drafting.beam import BeamWriter
from card.drafting.drafter import DrafterWorker
from card.errors import ModelError
from card.links import in_process
from card.links.in_process import ThreadLink
from tests.decoding import GREEDY, drafter_for, plain, toy_draft, toy_target, unhurried
from tests.decoding import decode as decode_as
from tests.waiting import until

TARGET = unhurried(toy_target())
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=60)


class TroubledWorker(DrafterWorker):
    """Drafts a few passes and then does what the test wants."""

    def __init__(self, trouble: BaseException | threading.Event, after: int = 2) -> None:
        super().__init__(BeamWriter(toy_draft(TARGET, 0.9)), clock=time.perf_counter)
        self._trouble, self._left = trouble, after

    def step(self):
        self._left -= 1
        if self._left >= 0 or self.is_shut_down:
            return super().step()
        if isinstance(self._trouble, threading.Event):
            self._trouble.wait()
            return []
        raise self._trouble


def decode(link: ThreadLink, **request: object):
    return decode_as(TARGET, link, **request)


def waits_of(link: ThreadLink) -> list[float]:
    """Note from now on for how many seconds the drafter is waited for."""
    waits: list[float] = []
    wait = link.wait

    def noted(timeout_s: float) -> None:
        waits.append(timeout_s)
        wait(timeout_s)

    link.wait = noted  # type: ignore[method-assign]
    return waits


def decode_until_down(link: ThreadLink) -> None:
    """Decode again and again, always the same text, until the link is down."""

    def is_down() -> bool:
        assert decode(link)[:2] == plain(TARGET)
        return link.status.state != "up"

    until(is_down)
    assert decode(link)[:2] == plain(TARGET)


@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["sps", "card"])
def test_text_is_that_of_plain_decoding(verify, params, method):
    link = ThreadLink(drafter_for(toy_draft(TARGET, 0.9)))
    link.start()
    try:
        for _ in range(3):
            token_ids, reason, stats = decode(link, method=method, params=params, draft=DraftSettings(verify=verify))
            assert (token_ids, reason) == plain(TARGET, params=params)
            assert stats.drafter_state == "up"
        if method == "sps":
            assert stats.accepted_tokens > 0
    finally:
        link.close()


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (ModelError("no such layer"), "no such layer"),
        (RuntimeError("out of memory\nand a long story"), "RuntimeError: out of memory"),
        (MemoryError(), "MemoryError"),
    ],
    ids=["ours", "torch", "empty"],
)
def test_a_worker_that_raises_is_down_with_its_reason_and_the_text_goes_on(trouble, reason):
    link = ThreadLink(TroubledWorker(trouble))
    link.start()
    try:
        decode_until_down(link)
        assert link.status.reason == reason
        assert decode(link)[2].drafter_state.startswith("down: ")
    finally:
        link.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_programming_error_in_the_worker_shows_and_the_text_goes_on():
    link = ThreadLink(TroubledWorker(KeyError("a bug")))
    link.start()
    decode_until_down(link)
    assert str(link.status) == "down: its thread has ended"
    link.close()


def test_a_hung_worker_holds_up_neither_the_text_nor_close(monkeypatch):
    monkeypatch.setattr(in_process, "JOIN_TIMEOUT_S", 0.1)
    release = threading.Event()
    link = ThreadLink(TroubledWorker(release))
    link.start()
    for _ in range(3):
        assert decode(link)[:2] == plain(TARGET)
    link.close()
    release.set()


def test_a_rejected_drafter_is_not_waited_for():
    link = ThreadLink(drafter_for(toy_draft(TARGET, 0.9)))
    link.start()
    link.reject("it lies")
    waits = waits_of(link)
    token_ids, reason, stats = decode(link, method="sps")
    assert (token_ids, reason) == plain(TARGET)
    assert stats.drafter_state == "down: it lies"
    assert waits == []
    link.close()


def test_close_ends_the_thread_may_be_called_twice_and_text_goes_on_afterwards():
    link = ThreadLink(drafter_for(toy_draft(TARGET, 0.9)))
    link.close()  # before it has started
    link.start()
    decode(link)
    link.close()
    link.close()
    assert link.status.state == "down"
    until(lambda: not any(t.name == "card-drafter" and t.is_alive() for t in threading.enumerate()))
    assert decode(link, method="sps")[:2] == plain(TARGET)


def test_an_idle_worker_uses_no_processor_time():
    link = ThreadLink(drafter_for(toy_draft(TARGET, 0.9)))
    link.start()
    decode(link)
    until(lambda: link.worker.is_idle)
    thread = next(t for t in threading.enumerate() if t.name == "card-drafter")
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    assert time.clock_gettime(clock) - before < 0.1
    link.close()


def test_a_drafter_that_does_not_answer_is_waited_for_only_once():
    link = ThreadLink(drafter_for(toy_draft(TARGET, 0.9)))
    link.start()
    decode_as(TARGET, link, request_id=-1, method="sps")
    waits = waits_of(link)
    token_ids, reason, stats = decode_as(TARGET, link, request_id=-1, method="sps")  # closed: not revived
    assert (token_ids, reason) == plain(TARGET)
    assert stats.drafter_passes == 0
    assert waits.count(max(waits)) == 1, "the first wait of a round is for as long as it may last"
    link.close()
