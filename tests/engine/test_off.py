"""A drafter that rests costs nothing: rounds are those of plain decoding, and it is in step again when it drafts."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams, Schedule
from card.drafting.drafter import DrafterWorker
from card.drafting.drafter_pass import TurnEnd
from card.engine.engine import Engine
from card.engine.policy.rounds import Draft, Outcome, Policy, RoundView
from card.engine.queue import Limits
from card.engine.replica import Replica
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.links.in_process import InlineLink
from card.links.link import DrafterLink
from card.links.switch import SwitchLink
from tests.decoding import fake, inline, make_request, plain, run_all, toy_draft, toy_target
from tests.examples import settings
from tests.reaching_in import listen, policy_of, running, worker_of
from tests.toy import TableModel


class Scripted(Policy):
    """Follows a script of schedules, one a round, and drafts three layers in each turn."""

    def __init__(self, script: Sequence[Schedule]) -> None:
        super().__init__("off")
        self._script: Iterator[Schedule] = chain(script, repeat(script[-1]))
        self.outcomes: list[tuple[Schedule, Outcome]] = []

    def begin(self, num_requests: int, available: frozenset[Schedule]) -> None:
        self.schedule = next(self._script)

    def prepare(self, view: RoundView) -> Draft | None:
        return Draft(3) if view.takes_turns and (view.requests or view.num_prompt_tokens) else None

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append((self.schedule, outcome))


def engine_of(target: TableModel, link: DrafterLink | None, script: Sequence[Schedule], **limits: int) -> Engine:
    worker = TargetWorker(target, clock=time.perf_counter)
    return Engine(worker, link, policy=Scripted(script), limits=Limits(**limits))


def request(idx: int, *, temperature: float = 0.0, max_tokens: int = 40) -> Request:
    params = SamplingParams(temperature=temperature, seed=idx, max_tokens=max_tokens)
    draft = DraftSettings(beam_width=2, lead=6)
    return make_request(idx, prompt=tuple((idx + j) % 12 for j in range(5 + idx)), params=params, draft=draft)


def assert_in_step(worker: TargetWorker, drafter: DrafterWorker, known_as: Callable[[int], int] = int) -> None:
    """Check that drafter and target hold the same texts and trees."""
    for sequence in running(worker):
        if sequence.is_prefilling:
            continue
        drafted, tree = drafter.drafting[known_as(sequence.request.request_id)].sequence, sequence.replica.tree
        assert drafted.token_ids == sequence.token_ids
        assert (tree.epoch, tree.root_id, tree.pending) == (drafted.cache.epoch, drafted.cache.root_id, ())
        assert tree.snapshot() == drafted.cache.snapshot()


@given(
    seed=st.integers(0, 99),
    agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    script=st.lists(st.sampled_from(["off", "off", "turns"]), min_size=1, max_size=60),
    num_requests=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 1.0]),
    chunk=st.sampled_from([2, 4, 64]),
)
@settings(max_examples=30)
def test_after_any_number_of_plain_rounds_drafter_and_replica_hold_the_text_again(
    seed: int, agreement: float, script: list[Schedule], num_requests: int, temperature: float, chunk: int
) -> None:
    target = toy_target(seed)
    link = inline(toy_draft(target, agreement))
    engine = engine_of(target, link, script, prefill_chunk=chunk)
    requests = [request(i, temperature=temperature) for i in range(num_requests)]
    texts: dict[int, list[int]] = {one.request_id: [] for one in requests}
    arrivals = {3 * i: one for i, one in enumerate(requests)}
    round_idx = 0
    while engine.has_work or round_idx <= max(arrivals):
        if round_idx in arrivals:
            engine.add(engine.check(arrivals[round_idx]))
        for update in engine.step():
            texts[update.request_id] += update.token_ids
        if policy_of(engine).schedule == "turns":
            listen(engine)
            assert_in_step(worker_of(engine), link.worker)
        round_idx += 1
    for one in requests:
        assert texts[one.request_id] == plain(toy_target(seed), params=one.params, prompt=one.prompt_ids)[0]
    assert link.status.state == "up"


def test_a_policy_is_told_how_much_context_the_tokens_of_prompts_had() -> None:
    engine = engine_of(toy_target(1), None, ["off"], prefill_chunk=4)
    run_all(engine, {0: [request(0)], 2: [request(1), request(2)]})
    views = [outcome.view for _, outcome in policy_of(engine).outcomes]
    read = [(one.num_prompt_tokens, one.num_prompt_pairs) for one in views if one.num_prompt_tokens]
    assert read == [(5, 0), (4, 0), (4, 2 * 4 + 2 * 0), (4, 4 * 2), (1, 1 * 6)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of all that is done for a drafter."""
    counted: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def counting(*args: object, **named: object) -> object:
            counted[name] += 1
            return real(*args, **named)

        monkeypatch.setattr(owner, name, counting)

    for name in ("query", "catch_up"):
        count(TargetWorker, name)
    for name in ("compare", "advance", "correction", "open_message"):
        count(Replica, name)
    for name in ("send", "draft"):
        count(InlineLink, name)
    return counted


def test_a_round_that_is_off_does_nothing_for_the_drafter(calls: Counter[str]) -> None:
    target = toy_target()
    engine = engine_of(target, inline(toy_draft(target, 0.9)), ["turns"] * 6 + ["off"] * 12 + ["turns"])
    for one in (request(0), request(1)):
        engine.add(engine.check(one))
    for _ in range(6):
        engine.step()
    listen(engine)
    (first, *_) = running(worker_of(engine))
    tree, nodes = first.replica.tree, first.replica.tree.snapshot()
    assert calls["query"] > 0, "it does when it drafts"
    calls.clear()
    for _ in range(12):
        engine.step()
    assert calls == {}, "nothing is asked, moved on, compared or told"
    assert first.replica.tree is tree
    assert tree.snapshot() == nodes
    engine.step()
    assert calls["catch_up"] == 1
    assert calls["draft"] == 1


def test_a_request_that_comes_and_goes_while_the_drafter_rests_is_told_to_nobody_but_for_its_end(
    calls: Counter[str],
) -> None:
    target = toy_target()
    engine = engine_of(target, inline(toy_draft(target, 0.9)), ["off"])
    run_all(engine, {0: [request(0, max_tokens=10)]})
    assert calls.keys() <= {"send"}
    assert calls["send"] <= 1


def num_python_calls(engine: Engine, num_rounds: int) -> int:
    """Return how many Python functions are called in so many rounds."""
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(num_rounds):
            engine.step()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_round_that_is_off_calls_as_many_functions_as_one_without_a_drafter(num_requests: int) -> None:
    counts = []
    for link in (None, inline(toy_draft(toy_target(), 0.9))):
        engine = engine_of(toy_target(), link, ["off"])
        for idx in range(num_requests):
            engine.add(engine.check(request(idx, max_tokens=100)))
        for _ in range(4):
            engine.step()
        counts.append(num_python_calls(engine, 20) / 20)
    without, resting = counts
    assert resting <= without + 8, "to listen to the drafter takes a few, however many requests run"


def first_turn(engine: Engine, policy: Scripted) -> RoundView:
    """Run until the first round whose schedule is turns has ended; return its view."""
    while policy.schedule != "turns":
        engine.step()
    return policy.outcomes[-1][1].view


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("chunk", [2, 64])
def test_requests_that_came_while_the_drafter_rested_are_drafted_for_in_the_first_turn(
    num_requests: int, chunk: int
) -> None:
    target = toy_target()
    engine = engine_of(target, inline(toy_draft(target, 1.0)), ["off"] * 20 + ["turns"], prefill_chunk=chunk)
    for idx in range(num_requests):
        engine.add(engine.check(request(idx)))
    view = first_turn(engine, policy_of(engine))
    assert [num for num, _ in view.passes] == [num_requests] * 3
    verified = policy_of(engine).outcomes[-1][1].result.verified
    assert all(len(one.accepted) == 3 for one in verified), "and what was drafted is verified in that round"


@pytest.mark.parametrize("before", ["off", "beside"])
def test_the_first_turn_behind_another_drafter_drafts_for_all_requests(before: Schedule) -> None:
    target = toy_target()
    draft = toy_draft(target, 1.0)
    beside = fake(draft)
    beside.runs_by_itself = True
    engine = engine_of(target, SwitchLink(beside, inline(draft)), [before] * 10 + ["turns"])
    for idx in range(2):
        engine.add(engine.check(request(idx)))
    view = first_turn(engine, policy_of(engine))
    assert [num for num, _ in view.passes] == [2] * 3


def test_a_request_that_wants_no_speculation_is_never_told_of(calls: Counter[str]) -> None:
    target = toy_target()
    engine = engine_of(target, inline(toy_draft(target, 1.0)), ["off", "off", "turns", "turns", "off", "turns"])
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=20, speculates=False)
    unwilling = make_request(0, params=params)
    assert run_all(engine, {0: [unwilling]})[0] == plain(toy_target(), params=params)
    assert calls["send"] == calls["correction"] == calls["open_message"] == 0


def test_a_turn_in_which_some_requests_rest_drafts_for_the_others_alone() -> None:
    class RestingOne(Scripted):
        def prepare(self, view: RoundView) -> Draft | None:
            return Draft(3, TurnEnd(resting=frozenset({1}))) if len(view.requests) == 3 else None

    target = toy_target()
    policy = RestingOne(["turns"])
    worker = TargetWorker(target, clock=time.perf_counter)
    engine = Engine(worker, inline(toy_draft(target, 1.0)), policy=policy)
    for idx in range(3):
        engine.add(engine.check(request(idx)))
    for _ in range(8):
        engine.step()
    drafted = [outcome.result.verified for _, outcome in policy.outcomes if outcome.view.has_drafted]
    assert drafted
    for verified in drafted:
        assert {one.request_id for one in verified if one.offer} == {0, 2}
