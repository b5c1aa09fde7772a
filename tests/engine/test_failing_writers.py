"""A local writer that raises or talks nonsense costs its own candidates; texts, rows and other writers are unharmed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, EngineSettings, SamplingParams
from card.drafting.local import find_writer
from card.drafting.local.protocol import Observation, WriterSequence
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.tree.nodes import PATH_END, Nodes
from tests.decoding import inline, make_request, plain, run_all, toy_draft, toy_target
from tests.examples import settings

CALLS = ("open", "propose", "observe", "close")


class Unreliable:
    """A writer of one request that raises at any call with some chance, and proposes whatever comes to its mind."""

    def __init__(self, seed: int, fails: float, nonsense: float) -> None:
        self._rng = random.Random(seed)
        self._fails = fails
        self._nonsense = nonsense

    def open(self) -> Unreliable:
        self._stumble()
        return self

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        self._stumble()
        rng, size = self._rng, self._rng.randrange(6)
        parents = [rng.randrange(PATH_END, idx) for idx in range(size)]
        tokens = [rng.randrange(12) for _ in range(size)]
        if rng.random() < self._nonsense:
            kinds = rng.choices((tokens, parents, [0.0] * size), k=3)
            return Nodes(*map(tuple, kinds), num_probes=rng.randrange(9))
        return Nodes(tuple(tokens), tuple(parents), (-1.0,) * size)

    def observe(self, seen: Observation) -> None:
        self._stumble()

    def close(self) -> None:
        self._stumble()

    def _stumble(self) -> None:
        if self._rng.random() < self._fails:
            raise self._rng.choice((RuntimeError, KeyError, MemoryError, ValueError))("a bug")


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    fails=st.sampled_from([0.0, 0.1, 1.0]),
    nonsense=st.sampled_from([0.0, 0.1, 1.0]),
    arrivals=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    has_drafter=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_texts_are_those_of_plain_decoding_whatever_a_writer_does(
    seed: int, fails: float, nonsense: float, arrivals: list[int], has_drafter: bool, temperature: float
) -> None:
    target = toy_target(seed)

    def begin(request: Request) -> WriterSequence:
        return Unreliable(seed + request.request_id, fails, nonsense).open()

    lookup = find_writer("lookup")(EngineSettings(), target.vocab_size)
    writers = {"unreliable": begin, "lookup": lambda request: lookup.open(request.prompt_ids)}
    worker = TargetWorker(target, clock=time.perf_counter, writers=writers)
    link = inline(toy_draft(target, 0.7)) if has_drafter else None
    engine = Engine(worker, link, limits=Limits(max_num_seqs=3))
    params = [SamplingParams(temperature=temperature, seed=seed + i, max_tokens=20) for i in range(len(arrivals))]
    coming: dict[int, list[Request]] = {}
    for i, round_idx in enumerate(arrivals):
        draft = DraftSettings(verify="tree", budget=8, min_verify_prob=0.0)
        coming.setdefault(round_idx, []).append(
            make_request(i, params=params[i], draft=draft, uses_drafter=has_drafter)
        )
    texts = run_all(engine, coming)
    assert texts == {i: plain(target, params=one) for i, one in enumerate(params)}
    stats = engine.stats()
    assert (stats.num_failed, stats.kv_open_sequences) == (0, 0)


@pytest.mark.parametrize("fails_at", CALLS)
def test_only_the_writer_that_raises_is_left_out_and_only_in_its_request(
    fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = toy_target()

    class Failing:
        def __init__(self, request: Request) -> None:
            self._fails = request.request_id == 0
            self._call("open")

        def _call(self, name: str) -> None:
            if self._fails and name == fails_at:
                raise ZeroDivisionError("a bug")

        def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
            self._call("propose")
            return Nodes((3, 4), (-1, -1), (-0.1, -0.2))

        def observe(self, seen: Observation) -> None:
            self._call("observe")

        def close(self) -> None:
            self._call("close")

    suffix = find_writer("suffix")(EngineSettings(), target.vocab_size)
    writers = {"failing": Failing, "suffix": lambda request: suffix.open(request.prompt_ids)}
    worker = TargetWorker(target, clock=time.perf_counter, writers=writers)
    engine = Engine(worker, None)
    draft = DraftSettings(verify="tree", min_verify_prob=0.0)
    for i in range(2):
        engine.add(engine.check(make_request(i, draft=draft, uses_drafter=False)))
    verified: dict[int, dict[str, int]] = {}
    while engine.has_work:
        for update in engine.step():
            verified[update.request_id] = dict(update.stats.verified_by_writer)
    names = {i: {name for label in verified[i] for name in label.split("+")} for i in verified}
    assert names[1] == {"failing", "suffix"}
    assert names[0] == ({"failing", "suffix"} if fails_at == "close" else {"suffix"})
    assert len(caplog.records) == 1
    assert "writer failing failed" in caplog.text
