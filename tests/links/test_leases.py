"""A drafter on lease: whatever the pool says, or does not say, the text is that of plain decoding."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from card.assembly.plan import Facts, resolve
from card.drafting.messages import Close, Open
from card.errors import SettingsError, WorkerError
from card.links import leases as leasing
from card.links import zmq_link
from card.links.keys import load_server_keys, make_keys
from card.links.leases import Lease, LeasedLink, NoLease
from card.links.server import DraftServer
from tests.decoding import decode, plain, toy_draft, toy_target
from tests.drafts import draft_spec
from tests.links.serving import PATIENCE_S, decode_until_accepted, make_server, running
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

TARGET = toy_target()
Answer = Lease | NoLease | Exception | None  # None: not yet


class FakePool:
    """Answers as a test says, and notes what it is asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)  # the last one for ever
        self.renewals: list[Answer] = []  # the same, of renewals; empty: the lease is kept
        self.asked: list[tuple[str, int, int]] = []
        self.renewed: list[tuple[Lease, int]] = []
        self.held: Lease | None = None
        self.pending: list[Future[Lease | NoLease]] = []

    def ask(self, tokenizer: str, load: int, avoid: int) -> Future[Lease | NoLease]:
        self.asked.append((tokenizer, load, avoid))
        return self._answered(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    def renew(self, lease: Lease, tokenizer: str, load: int) -> Future[Lease | NoLease]:
        del tokenizer
        self.renewed.append((lease, load))
        if not self.renewals:
            return self._answered(lease)
        return self._answered(self.renewals.pop(0) if len(self.renewals) > 1 else self.renewals[0])

    def give_back(self) -> None:
        self.held = None

    def _answered(self, answer: Answer) -> Future[Lease | NoLease]:
        future: Future[Lease | NoLease] = Future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is None:
            self.pending.append(future)
        else:
            self.held = answer if isinstance(answer, Lease) else None
            future.set_result(answer)
        return future


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(leasing, "MOST_PAUSE_S", 0.05)
    monkeypatch.setattr(leasing, "RENEW_S", 0.05)


@contextlib.contextmanager
def drafters(number: int, **how: Any) -> Iterator[list[tuple[DraftServer, Lease]]]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(make_server(toy_draft(TARGET, 0.9), tokenizer="abc", **how)))
            for _ in range(number)
        ]
        yield [(server, Lease(server.address, number)) for number, server in enumerate(servers, 1)]


@contextlib.contextmanager
def leased(pool: FakePool, **more: Any) -> Iterator[LeasedLink]:
    settings: dict[str, Any] = {"start_timeout_s": PATIENCE_S, "silence_timeout_s": PATIENCE_S, "tokenizer": "abc"}
    link = LeasedLink(pool, vocab_size=12, **settings | more)
    try:
        link.begin()
        yield link
    finally:
        link.close()


def until_up(link: LeasedLink) -> None:
    until(lambda: link.receive() is not None and link.status.state == "up")


def keep_text(link: LeasedLink) -> None:
    """Decode with this link, as often as need be for it to have helped; the text is always that of plain decoding."""
    decode_until_accepted(TARGET, link)


# ---- a lease --------------------------------------------------------------------------------------------------------


def test_the_drafter_of_the_lease_is_used_and_given_back_at_the_end() -> None:
    with drafters(1) as [(server, lease)]:
        pool = FakePool(lease)
        with leased(pool) as link:
            keep_text(link)
            assert (link.lease, server.num_sessions) == (lease, 1)
            assert pool.asked == [("abc", 0, 0)]
        assert pool.held is None
        until(lambda: server.num_sessions == 0)


def test_keys_are_used_with_whatever_drafter_is_leased(tmp_path: Path) -> None:
    make_keys(tmp_path, ["ann"])
    with drafters(1, keys=load_server_keys(tmp_path / "server")) as [(_, lease)]:
        with leased(FakePool(lease), keys=tmp_path / "ann") as link:
            keep_text(link)
        with leased(FakePool(lease)) as link:
            until(lambda: link.receive() == [] and "requires keys" in link.status.reason)


@pytest.mark.parametrize("answer", [None, NoLease("it has no drafter yet"), WorkerError("silence")])
def test_without_a_lease_the_text_is_decoded_plainly_and_nothing_waits(answer: Answer) -> None:
    pool = FakePool(answer)
    with leased(pool) as link:
        token_ids, reason, stats = decode(TARGET, link)
        assert (token_ids, reason) == plain(TARGET)
        assert stats.accepted_tokens == 0
        assert stats.waited_s == 0.0


def test_a_pool_that_has_no_drafter_is_asked_again_until_it_has() -> None:
    with drafters(1) as [(_, lease)]:
        pool = FakePool(NoLease("it has no drafter yet"), WorkerError("silence"), NoLease("full"), lease)
        with leased(pool) as link:
            until_up(link)
            assert len(pool.asked) == 4
            keep_text(link)


def test_why_there_is_no_lease_is_in_the_status() -> None:
    with leased(FakePool(NoLease("its drafters are busy"))) as link:
        until(lambda: link.receive() == [] and link.status.state == "down")
        assert link.status.reason == "its drafters are busy"


@pytest.mark.parametrize("address", ["udp://127.0.0.1:5", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", ""])
def test_an_address_that_is_none_is_not_used(address: str) -> None:
    with drafters(1) as [(_, lease)], leased(FakePool(Lease(address, 9), lease)) as link:
        until_up(link)
        keep_text(link)


# ---- its end --------------------------------------------------------------------------------------------------------


def test_a_drafter_that_is_lost_is_replaced_by_another_lease_and_named_as_the_one_to_avoid() -> None:
    with contextlib.ExitStack() as stack, drafters(1) as [(_, second)]:
        first_server = make_server(toy_draft(TARGET, 0.9), tokenizer="abc")
        stack.enter_context(running(first_server))
        pool = FakePool(Lease(first_server.address, 7), second)
        with leased(pool) as link:
            keep_text(link)
            stack.close()
            until(lambda: link.receive() is not None and link.lease == second)
            keep_text(link)
            assert pool.asked[1] == ("abc", 0, 7)
            assert link.status.num_restarts == 1


def test_a_lease_is_renewed_with_the_requests_that_are_open() -> None:
    with drafters(1) as [(_, lease)]:
        pool = FakePool(lease)
        with leased(pool) as link:
            until_up(link)
            for request_id in (1, 2):
                link.send(Open(request_id, (1, 2, 3), draft_spec()))
            until(lambda: link.receive() is not None and pool.renewed[-1:] == [(lease, 2)])
            link.send(Close(1))
            until(lambda: link.receive() is not None and pool.renewed[-1] == (lease, 1))


def test_a_pool_that_does_not_answer_a_renewal_costs_nothing() -> None:
    with drafters(1) as [(_, lease)]:
        pool = FakePool(lease)
        pool.renewals = [WorkerError("silence")]
        with leased(pool) as link:
            until(lambda: link.receive() is not None and len(pool.renewed) >= 3)
            assert link.status.state == "up"
            keep_text(link)


def test_a_lease_that_the_pool_ends_is_asked_for_anew() -> None:
    with drafters(2) as [(first_server, first), (_, second)]:
        pool = FakePool(first, second)
        pool.renewals = [NoLease("the drafter is gone"), second]
        with leased(pool) as link:
            until(lambda: link.receive() is not None and link.lease == second and link.status.state == "up")
            until(lambda: first_server.num_sessions == 0)
            keep_text(link)


def test_a_lease_that_is_moved_goes_on_with_the_other_drafter_without_a_pause() -> None:
    with drafters(2) as [(first_server, first), (second_server, second)]:
        pool = FakePool(first)
        pool.renewals = [second]
        with leased(pool) as link:
            until(lambda: link.receive() is not None and link.lease == second and link.status.state == "up")
            until(lambda: first_server.num_sessions == 0)
            assert second_server.num_sessions == 1
            assert len(pool.asked) == 1
            assert pool.held == second
            keep_text(link)


# ---- a target without requests --------------------------------------------------------------------------------------


def test_a_target_without_requests_leaves_its_drafter_to_others_until_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leasing, "IDLE_S", 0.1)
    monkeypatch.setattr(leasing, "BUSY_LOOK_S", 0.0)  # no look is one of a target at work
    with drafters(1) as [(server, lease)]:
        pool = FakePool(lease)
        with leased(pool) as link:
            until(lambda: link.receive() is not None and link.status.reason == "there are no requests")
            assert (link.lease, pool.held) == (None, None)
            until(lambda: server.num_sessions == 0)
            link.send(Open(1, (1, 2, 3), draft_spec()))
            until_up(link)
            assert (link.lease, len(pool.asked)) == (lease, 2)


def test_what_is_granted_after_the_target_went_to_rest_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "IDLE_S", 0.05)
    monkeypatch.setattr(leasing, "BUSY_LOOK_S", 0.0)
    pool = FakePool(None)
    pool.held = Lease("tcp://127.0.0.1:5", 1)  # as the pool sees it, once it has read the question
    with leased(pool) as link:
        until(lambda: link.receive() == [] and link.status.reason == "there are no requests")
        assert pool.held is None
        pool.pending[0].set_result(Lease("tcp://127.0.0.1:5", 1))
        assert link.receive() == []
        assert link.lease is None


# ---- what stands in logs, and what goes with a pool -----------------------------------------------------------------


def test_no_address_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "card")
    with drafters(1) as [(_, lease)], leased(FakePool(Lease("tcp://127.0.0.1:9", 3), lease)) as link:
        until_up(link)
    assert "tcp" not in caplog.text
    assert "with a drafter of the pool is lost" in caplog.text


@pytest.mark.parametrize(
    "settings", [{"draft_address": "tcp://127.0.0.1:5"}, {"placement": "process"}, {"schedule": "turns"}]
)
def test_settings_that_say_where_the_drafter_is_do_not_go_with_a_pool(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"leave|drafter"):
        resolve(settings, Facts(has_pool=True))


def test_a_plan_with_a_pool_drafts_beside_the_target() -> None:
    plan = resolve({}, Facts(has_pool=True))
    assert (plan.method.name, dict(plan.placements), plan.leases_drafter) == ("card", {"beside": "remote"}, True)
