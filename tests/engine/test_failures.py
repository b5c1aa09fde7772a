"""An error in one request's part of a round ends that request in one line; the others' texts are as ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, EngineSettings, Grammar, SamplingParams
from card.drafting.local import find_writer
from card.engine import sequence as sequence_module
from card.engine import target_pass
from card.engine.engine import Engine
from card.engine.policy.rounds import Policy
from card.engine.request import Request, Update
from card.engine.target import TargetWorker
from card.errors import GrammarError, TargetError, WorkerError
from card.text.following import Threads
from card.tree import shaping as shaping_module
from card.tree.nodes import Nodes
from tests.decoding import PROMPT, inline, make_request, plain, toy_draft, toy_target
from tests.examples import settings
from tests.reaching_in import queue_of
from tests.shaping import ToyGrammar
from tests.text.test_following import ByHand
from tests.toy import TableModel

BAD = 2  # the request whose part fails
ENDS = frozenset({ToyGrammar.END})
TREE = DraftSettings(verify="tree", beam_width=4, budget=6, lead=4, min_verify_prob=0.0)
PARAMS = SamplingParams(
    temperature=1.0, max_tokens=24, presence_penalty=0.5, logprobs=2, grammar=Grammar("regex", "toy")
)


class Stop:
    """A stop check that never finds anything."""

    def feed(self, token_id: int) -> bool:
        return False


def process(ids: Any, logits: Any) -> Any:
    return logits


def make_requests() -> list[Request]:
    requests = [
        make_request(
            i, params=PARAMS.replace(seed=i), draft=TREE, prompt=(*PROMPT, i), end_ids=ENDS, grammar=ToyGrammar(20)
        )
        for i in range(4)
    ]
    return [replace(one, stop_check=Stop(), logits_processor=process) for one in requests]


def make_engine(target: TableModel, *, policy: Policy | None = None, has_drafter: bool = True, **parts: Any) -> Engine:
    suffix = find_writer("suffix")(EngineSettings(), target.vocab_size)
    writers = {"suffix": lambda request: suffix.open(request.prompt_ids)}
    worker = TargetWorker(target, clock=time.perf_counter, writers=writers, **parts)
    return Engine(worker, inline(toy_draft(toy_target(), 0.8)) if has_drafter else None, policy=policy)


def run(engine: Engine, requests: Sequence[Request]) -> dict[int, tuple[list[int], Update]]:
    """Run requests that begin together; return the tokens and the last update of each."""
    found: dict[int, tuple[list[int], Update]] = {}
    for request in requests:
        engine.add(engine.check(request))
    while engine.has_work:
        for update in engine.step():
            tokens, _ = found.get(update.request_id, ([], update))
            found[update.request_id] = ([*tokens, *update.token_ids], update)
    return found


def alone(request: Request) -> list[int]:
    engine = make_engine(toy_target(), has_drafter=False)
    return run(engine, [replace(request, uses_drafter=False)])[request.request_id][0]


class Raises:
    """A function that raises at its n-th call for the request that is to fail, and else does what another does."""

    def __init__(self, real: Callable[..., Any], whose: Callable[..., int], at: int, error: type[Exception]) -> None:
        self._real, self._whose, self._left, self._error = real, whose, at, error
        self.has_raised = False

    def __get__(self, owner: Any, kind: Any) -> Any:
        return lambda *args, **options: self(owner, *args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._whose(*args, **options) == BAD:
            self._left -= 1
            if self._left < 0:
                self.has_raised = True
                raise self._error("a bug\nof many lines")
        return self._real(*args, **options)


def _of_sequence(sequence: Any, *_: object, **__: object) -> int:
    return int(sequence.request.request_id)


PLACES: dict[str, tuple[Any, str, Callable[..., int]]] = {
    "query": (TargetWorker, "query", lambda worker, sequence, **_: _of_sequence(sequence)),
    "permit": (sequence_module.Sequence, "permitted", _of_sequence),
    "policy": (Policy, "writer_budget", lambda policy, request: request.request_id),
    "shaping": (shaping_module.Shaping, "apply", lambda shaping, *_: getattr(shaping, "request_id", -1)),
    "commit": (shaping_module.Shaping, "commit", lambda shaping, *_: getattr(shaping, "request_id", -1)),
    "stop check": (sequence_module.Sequence, "cut", _of_sequence),
    "choosing": (target_pass, "_choose", _of_sequence),
    "logprobs": (target_pass, "_details", _of_sequence),
}


@settings(max_examples=30)
@given(
    place=st.sampled_from(sorted(PLACES)),
    at=st.integers(0, 6),
    error=st.sampled_from([KeyError, RuntimeError, MemoryError, ValueError, TargetError]),
    has_drafter=st.booleans(),
)
def test_an_error_in_one_requests_part_ends_that_request_and_no_other_text_changes(
    place: str, at: int, error: type[Exception], has_drafter: bool
) -> None:
    requests = [replace(one, uses_drafter=has_drafter) for one in make_requests()]
    wanted = [alone(one) for one in requests]
    owner, name, whose = PLACES[place]
    engine = make_engine(toy_target(), has_drafter=has_drafter)
    with pytest.MonkeyPatch.context() as patch:
        begin = sequence_module.Sequence.__init__

        def begin_named(sequence: Any, request: Request, *args: Any, **options: Any) -> None:
            begin(sequence, request, *args, **options)
            sequence.shaping.request_id = request.request_id

        patch.setattr(sequence_module.Sequence, "__init__", begin_named)
        failing = Raises(getattr(owner, name), whose, at, error)
        patch.setattr(owner, name, failing)
        found = run(engine, requests)
    for request in requests:
        tokens, last = found[request.request_id]
        if request.request_id != BAD or not failing.has_raised:
            assert (tokens, last.error) == (wanted[request.request_id], None)
            continue
        assert tokens == wanted[BAD][: len(tokens)]
        if last.error is not None:  # an error that candidates alone met costs the candidates
            assert last.finish_reason == "error"
            assert isinstance(last.error, TargetError)
            assert "a bug" in str(last.error)
            assert "\n" not in str(last.error)
    assert engine.stats().kv_open_sequences == 0
    again = make_requests()[0]
    assert run(engine, [replace(again, request_id=9, uses_drafter=has_drafter)])[9][0] == wanted[0]


@pytest.mark.parametrize("name", ["begin", "beam_width", "prepare", "choose", "observe"])
def test_a_policy_that_fails_costs_no_text(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Policy):
        """A policy one of whose calls fails each time."""

    def fail(*_: object) -> None:
        raise KeyError("a bug")

    setattr(Failing, name, fail)
    requests = make_requests()
    link = inline(toy_draft(toy_target(), 0.8))
    found = run(make_engine(toy_target(), policy=Failing(link.own_schedule)), requests)
    assert [found[one.request_id][0] for one in requests] == [alone(one) for one in requests]
    assert [record.message for record in caplog.records].count(
        f"the policy failed in {name}; decoding goes on: KeyError: 'a bug'"
    ) == 1


class Stubborn:
    """A writer that proposes a chain which the grammar forbids from its first or second token on."""

    def __init__(self, begin: int) -> None:
        self._chain = [begin, begin + 3, begin, begin + 1]

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        return Nodes.chain(self._chain[:budget], [-0.1 * (1 + i) for i in range(len(self._chain))][:budget])

    def observe(self, seen: object) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.mark.parametrize("begin", range(6))
def test_what_hangs_below_a_forbidden_candidate_goes_with_it(begin: int) -> None:
    target = toy_target()
    worker = TargetWorker(target, clock=time.perf_counter, writers={"stubborn": lambda request: Stubborn(begin)})
    request = make_request(1, params=PARAMS.replace(seed=4), draft=TREE, end_ids=ENDS, grammar=ToyGrammar(20))
    found = run(Engine(worker, None), [replace(request, uses_drafter=False)])
    assert (found[1][0], found[1][1].error) == (alone(request), None)
    stats = found[1][1].stats
    assert 0 < stats.verified_tokens < 4 * stats.target_passes, "what is known to be forbidden is not run"


# ---- the target's own failures --------------------------------------------------------------------------------------


class Poisoned(TableModel):
    """Cannot run one token; is it broken, it can run none."""

    poison, is_broken = 7, False

    def forward(self, extensions: Any) -> Any:
        if self.is_broken or any(self.poison in one.token_ids for one in extensions):
            raise IndexError("a bug in the model")
        return super().forward(extensions)


def poisoned() -> Poisoned:
    return Poisoned(0, vocab_size=12, order=2, spread=1.5, max_model_len=128, num_tree_rows=512)


def test_requests_that_no_pass_can_run_end_one_after_the_other_and_never_the_engine() -> None:
    target = poisoned()
    engine = make_engine(target, has_drafter=False)
    for i in range(8):
        ((_, last),) = run(engine, [make_request(i, prompt=(1, 7, 2), uses_drafter=False)]).values()
        assert last.finish_reason == "error"
        assert "IndexError: a bug in the model" in str(last.error)
    good = make_request(
        9, prompt=(1, 2), params=SamplingParams(temperature=0.0, seed=0, max_tokens=1), uses_drafter=False
    )
    assert len(run(engine, [good])[9][0]) == 1
    target.is_broken = True
    with pytest.raises(WorkerError, match=r"3 rounds in a row failed, and a single token fails with IndexError"):
        for i in range(20, 28):
            run(engine, [make_request(i, uses_drafter=False)])


def test_grammars_that_cannot_be_followed_are_no_failures_of_the_target() -> None:
    class Lost(ToyGrammar):
        def allowed(self, paths: Any) -> Any:
            raise GrammarError("the grammar cannot be followed: too complex; use a simpler one")

    target = toy_target()
    engine = make_engine(target, has_drafter=False)
    passes = []
    forward = target.forward
    target.forward = lambda extensions: passes.append(len(extensions)) or forward(extensions)  # type: ignore[method-assign,func-returns-value]
    for i in range(8):
        request = make_request(i, params=PARAMS.replace(seed=1), end_ids=ENDS, grammar=Lost(5), uses_drafter=False)
        ((tokens, last),) = run(engine, [request]).values()
        assert (tokens, last.finish_reason) == ([], "error")
        assert isinstance(last.error, GrammarError)
        assert str(last.error) == "the grammar cannot be followed: too complex; use a simpler one"
    assert passes == [1] * 8, "no pass is made twice for it, nor one to try the target"
    assert run(engine, [make_request(9, uses_drafter=False)])[9][0] == plain(toy_target())[0]


# ---- masks beside the pass ------------------------------------------------------------------------------------------


def test_masks_are_computed_beside_the_targets_pass_and_not_before_it() -> None:
    lanes, target = ByHand(), toy_target()
    forward, begun, before = target.forward, list[int](), list[int]()
    grammar = ToyGrammar(20)

    def run_beside(extensions: Any) -> Any:
        before.append(sum(one.sequence.masks.num_known([()]) for one in queue_of(engine).running.values()))
        begun.append(len(lanes.jobs))
        logits = forward(extensions)
        lanes.work()
        return logits

    target.forward = run_beside  # type: ignore[method-assign]
    engine = make_engine(target, lanes=lanes)
    params = PARAMS.replace(seed=3, max_tokens=20)
    request = make_request(1, params=params, draft=TREE, end_ids=ENDS, grammar=grammar)
    found = run(engine, [request])
    assert found[1][0] == alone(request)
    assert found[1][1].stats.accepted_tokens > 0, "candidates are followed beside the pass, too"
    assert before == [0] * len(before), "no pass waits for a mask"
    assert all(begun), "and each finds them begun"


def test_a_text_whose_mask_is_late_sits_out_and_the_others_go_on() -> None:
    lanes = ByHand()
    engine = make_engine(toy_target(), has_drafter=False, lanes=lanes)
    slow = make_request(1, params=PARAMS.replace(seed=3), end_ids=ENDS, grammar=ToyGrammar(20), uses_drafter=False)
    other = make_request(2, uses_drafter=False)
    for one in (slow, other):
        engine.add(engine.check(one))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    rounds = 0
    while engine.has_work:
        for update in engine.step():
            assert update.error is None
            tokens[update.request_id] += update.token_ids
        rounds += 1
        if rounds == 10:
            assert tokens[1] == []
            assert len(tokens[2]) >= 9, "a token a round, as if it were alone"
        if rounds % 10 == 0:
            lanes.work()
    assert tokens == {1: alone(slow), 2: plain(toy_target())[0]}


def test_texts_of_grammars_in_threads_are_those_of_plain_decoding() -> None:
    lanes, requests = Threads(10.0), make_requests()
    found = run(make_engine(toy_target(), lanes=lanes), requests)
    lanes.close()
    assert [found[one.request_id][0] for one in requests] == [alone(one) for one in requests]
