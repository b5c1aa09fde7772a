"""A writer that makes several layers in a pass: the tree of as many passes, and the text of plain decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.config.registry import methods
from card.drafting.drafter import DrafterWorker
from card.drafting.messages import Declined, DraftSpec, Open
from card.drafting.protocol import DraftSequence, DraftWriter
from card.engine.trace import Trace
from card.errors import CardError
from card.links.in_process import InlineLink, ThreadLink
from card.tree.nodes import NewNodes
from tests.decoding import (
    assert_plain_in_turns,
    assert_plain_under_any_order,
    decode,
    plain,
    toy_draft,
    toy_target,
    unhurried,
)
from tests.drafting.test_drafter import (
    TEXT,
    Clock,
    Replica,
    beam_of,
    correction,
    layers_of,
    specs,
    tokens_to_commit,
    toy,
    turns,
    worker_on,
)
from tests.drafts import LayersWriter, draft_spec
from tests.engine.test_exactness import agreements, faults, sampling, shapes
from tests.examples import settings
from tests.toy import TableModel

NUM_LAYERS = LayersWriter.layers_per_pass
TAKING_TURNS = sorted(name for name, method in methods().items() if method.needs_draft)


def worker_of(writer: DraftWriter) -> DrafterWorker:
    return DrafterWorker(writer, clock=Clock())


def opened(model: TableModel, **changes: Any) -> DrafterWorker:
    worker = worker_of(LayersWriter(model))
    worker.receive(Open(7, TEXT, draft_spec(**changes)))
    return worker


class FailingWriter(LayersWriter):
    """Breaks down, or gives up the texts, after a few passes."""

    def __init__(self, model: TableModel, *, after: int, is_dead: bool) -> None:
        super().__init__(model)
        self._left, self._is_dead = after, is_dead

    def step(self, work: Sequence[tuple[DraftSequence, int]]) -> list[NewNodes | CardError]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the drafter has broken down")
        return super().step(work)

    def check(self) -> None:
        if self._is_dead:
            raise RuntimeError("the drafter is dead")


# ---- tree, numbers and limits ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 99), spec=specs, turns=turns)
def test_the_tree_is_that_of_as_many_passes_of_one_layer_after_any_corrections(
    seed: int, spec: DraftSpec, turns: list[tuple[int, int, int, list[int]]]
) -> None:
    worker, single = worker_of(LayersWriter(toy(seed))), worker_on(toy(seed, num_tree_rows=8000))
    replica = Replica(TEXT, spec)
    replica.receive(worker.receive(Open(7, TEXT, spec)))
    single.receive(Open(7, TEXT, spec))
    several, one = worker.drafting[7].sequence, beam_of(single)
    for num_passes, which, length, others in turns:
        for _ in range(num_passes):
            replica.receive(worker.step())
            for _ in range(NUM_LAYERS):
                single.step()
        assert several.cache.snapshot() == one.cache.snapshot()
        assert several.cache.num_nodes <= spec.shape.max_nodes
        assert several.cache.depth <= spec.shape.lead
        tokens = tokens_to_commit(one, which, length, others)
        message = correction(len(one.token_ids), tokens, beam_width=1 + which % 5)
        replica.commit(tokens)
        replica.receive(worker.receive(message))
        single.receive(message)
        assert several.cache.snapshot() == one.cache.snapshot(), "with what came from the secondary tier"
        assert (several.cache.epoch, several.token_ids) == (one.cache.epoch, one.token_ids)
        assert (several.num_dropped, several.num_rolled_back) == (one.num_dropped, one.num_rolled_back)
        assert replica.cache.snapshot() == several.cache.snapshot()
        assert replica.cache.epoch == several.cache.epoch


def test_the_layers_of_a_step_are_one_message_and_one_pass() -> None:
    worker = opened(toy(), beam_width=2, lead=20)
    trace = Trace(max_events=10)
    said = [layer for _ in range(2) for layer in layers_of(worker.step())]
    for layer in said:
        trace.layer(layer, 1.0)
    assert [(layer.seq, layer.num_passes, len(layer.nodes)) for layer in said] == [(1, 1, 6), (2, 2, 6)]
    assert worker.drafting[7].sequence.cache.depth == 2 * NUM_LAYERS
    assert len(trace.spans) == 2


def test_a_step_goes_no_deeper_than_the_lead_and_the_end_of_the_text() -> None:
    for changes in ({"lead": 4}, {"max_len": len(TEXT) + 4}):
        worker = opened(toy(), **changes)
        depths = []
        while not worker.is_idle:
            worker.step()
            depths.append(worker.drafting[7].sequence.cache.depth)
        assert depths == [3, 4, 4], changes


def test_a_writer_that_fails_at_a_text_declines_it() -> None:
    worker = worker_of(FailingWriter(toy(), after=1, is_dead=False))
    worker.receive(Open(7, TEXT, draft_spec()))
    worker.step()
    assert worker.step() == [Declined(7, "the draft model failed at it: RuntimeError: the drafter has broken down")]
    dead = worker_of(FailingWriter(toy(), after=0, is_dead=True))
    dead.receive(Open(7, TEXT, draft_spec()))
    with pytest.raises(RuntimeError, match="dead"):
        dead.step()


# ---- text -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(seed=st.integers(0, 99), agreement=agreements, params=sampling, shape=shapes, faults=faults)
def test_text_is_that_of_plain_decoding_under_any_message_order(**drawn: Any) -> None:
    assert_plain_under_any_order(lambda draft: worker_of(LayersWriter(draft)), **drawn)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 99),
    agreement=agreements,
    params=sampling,
    shape=shapes,
    method=st.sampled_from(TAKING_TURNS),
)
def test_text_is_that_of_plain_decoding_when_taking_turns(**drawn: Any) -> None:
    assert_plain_in_turns(lambda draft: worker_of(LayersWriter(draft)), **drawn)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_takes_a_pass_for_so_many_tokens_and_a_perfect_one_is_always_accepted(temperature: float) -> None:
    target = toy_target()
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=61)
    shape = DraftSettings(num_speculative_tokens=4)
    link = InlineLink(worker_of(LayersWriter(target)))
    _, _, stats = decode(target, link, method="sps", params=params, draft=shape)
    assert stats.accepted_tokens == stats.verified_tokens == 4 * stats.target_passes, "noise is that of each position"
    assert stats.drafter_passes == 2 * stats.target_passes, "three of four layers, then the last one"


@pytest.mark.parametrize("after", [0, 2, 5])
def test_text_is_that_of_plain_decoding_when_the_writer_dies(after: int) -> None:
    target = unhurried(toy_target())
    writer = FailingWriter(toy_draft(target, 0.9), after=after, is_dead=True)
    link = ThreadLink(DrafterWorker(writer, clock=time.perf_counter))
    link.begin()
    try:
        deadline = time.monotonic() + 10
        while link.status.state == "up":
            assert decode(target, link)[:2] == plain(target)
            assert time.monotonic() < deadline
        assert decode(target, link)[:2] == plain(target)
        assert "dead" in link.status.reason
    finally:
        link.close()
