"""Which writers an engine asks, by the requests at once, and the reasons why it does not ask others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import MappingProxyType

from card.config import SamplingParams, Schedule
from card.engine.engine import Engine
from card.engine.policy.rounds import Draft, Policy, RoundView
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.tree.nodes import NO_NODES, Nodes
from tests.decoding import inline, make_request, run_all, toy_draft, toy_target

NUM_ROUNDS = 9  # of a text of ten tokens whose candidates are all wrong


class Writer:
    """A writer without candidates, or one that fails."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        if self._fails:
            raise ZeroDivisionError("a bug")
        return NO_NODES

    def observe(self, seen: object) -> None:
        pass

    def close(self) -> None:
        pass


class Told(Policy):
    """Drafts nothing; leaves the drafter out of request 1, and asks no local writer for request 2."""

    undrafted = MappingProxyType({1: "copied"})

    def prepare(self, view: RoundView) -> Draft | None:
        return None

    def writer_budget(self, request: Request) -> int:
        return 0 if request.request_id == 2 else 4


def asked(schedule: Schedule, requests: Sequence[Request], *, has_drafter: bool = True) -> dict[tuple[str, ...], int]:
    """Return the counts of an engine that answers these requests."""
    target = toy_target()
    writers = {"mute": lambda request: Writer(False), "broken": lambda request: Writer(True)}
    worker = TargetWorker(target, clock=time.perf_counter, writers=writers)
    link = inline(toy_draft(target, 0.5)) if has_drafter else None
    engine = Engine(worker, link, policy=Told(schedule))
    run_all(engine, {0: list(requests)})
    return dict(engine.stats().asked_rounds)


def request(idx: int, **params: bool) -> Request:
    return make_request(idx, params=SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_ROUNDS + 1, **params))


def test_each_writer_is_counted_with_what_was_decided_about_it() -> None:
    counts = asked("turns", [request(0), request(1), request(2)])
    assert counts == {
        ("beam", "3-4", "asked"): 2 * NUM_ROUNDS,
        ("beam", "3-4", "copied"): NUM_ROUNDS,
        ("mute", "3-4", "asked"): 2 * NUM_ROUNDS,
        ("mute", "3-4", "rests"): NUM_ROUNDS,
        ("broken", "3-4", "failed"): 2 * NUM_ROUNDS,
        ("broken", "3-4", "rests"): NUM_ROUNDS,
    }


def test_plain_decoding_and_requests_without_speculation_ask_no_drafter() -> None:
    assert asked("off", [request(1)])["beam", "1", "plain"] == NUM_ROUNDS
    assert asked("turns", [request(0, speculates=False)]) == {("beam", "1", "request"): NUM_ROUNDS}


def test_an_engine_without_a_drafter_counts_none() -> None:
    counts = asked("off", [request(0), request(1)], has_drafter=False)
    assert {key[:2] for key in counts} == {("mute", "2"), ("broken", "2")}
