"""The drafting worker: rows and tree stay those of the text, and no message order can harm it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from card.drafting import beam
from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.drafter import DrafterWorker
from card.drafting.drafter_pass import step_together
from card.drafting.growth import RULES
from card.drafting.messages import (
    Close,
    Correction,
    Declined,
    DrafterMessage,
    DraftSpec,
    Layer,
    Open,
    Ping,
    Pong,
    Resync,
    Shutdown,
)
from card.errors import ProtocolError
from card.models.protocol import NO_PARENT, Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from card.tree.candidates import CandidateCache
from card.tree.logits import top
from tests.drafting.test_messages import id_lists, messages
from tests.drafts import assert_rows_fit_the_tree, assert_scores_are_those_of_the_model, draft_spec
from tests.examples import settings
from tests.reaching_in import cache_of, kv_of
from tests.tiny import tiny_llama
from tests.toy import TableModel

TEXT = (3, 1, 4, 1, 5)
V = 12


class Clock:
    """Goes on by one second at each look."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def __call__(self) -> float:
        return float(next(self._looks))


class Replica:
    """What a target would hold that gets every message in order."""

    def __init__(self, text: Iterable[int], spec: DraftSpec) -> None:
        self.text = list(text)
        self.cache = CandidateCache(max_nodes=spec.shape.max_nodes)
        self.next_seq = 0

    def commit(self, token_ids: list[int]) -> None:
        self.text += token_ids
        self.cache.advance(token_ids)

    def receive(self, messages: list[DrafterMessage]) -> None:
        for layer in messages:
            assert isinstance(layer, Layer)
            assert layer.seq == self.next_seq, "layers are numbered without gaps"
            self.next_seq += 1
            if layer.is_reset:
                self.cache.restart(layer.epoch, layer.root_id, self.text[layer.root_position + 1 :])
            self.cache.extend(layer.epoch, layer.nodes)

    def assert_equals(self, beam: BeamSequence) -> None:
        assert self.text == beam.token_ids
        assert not self.cache.pending
        assert (self.cache.epoch, self.cache.root_id) == (beam.cache.epoch, beam.cache.root_id)
        assert self.cache.snapshot() == beam.cache.snapshot()


def toy(seed: int = 0, **settings: int) -> TableModel:
    return TableModel(seed, V, 3, spread=1.0, **{"num_tree_rows": 512, **settings})


def worker_on(model: TableModel | RowRunner, max_requests: int = 64) -> DrafterWorker:
    return DrafterWorker(BeamWriter(model), clock=Clock(), max_requests=max_requests)


def opened(model: TableModel | RowRunner, **changes: object) -> DrafterWorker:
    worker = worker_on(model)
    worker.receive(Open(7, TEXT, draft_spec(**changes)))
    return worker


def beam_of(worker: DrafterWorker, request_id: int = 7) -> BeamSequence:
    return worker.drafting[request_id].sequence


def correction(start: int, ids: Iterable[int], **changes: Any) -> Correction:
    unchanged = {"request_id": 7, "wants_snapshot": False}
    return Correction(round_idx=0, start=start, token_ids=tuple(ids), **unchanged | changes)


def layers_of(messages: list[DrafterMessage]) -> list[Layer]:
    assert all(isinstance(message, Layer) for message in messages)
    return messages  # type: ignore[return-value]


# ---- any sequence of corrections ------------------------------------------------------------------------------------

# Passes to make, then what to commit: of which node (modulo their number) how much of the path, and then other tokens.
turns = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 4), st.lists(st.integers(0, V - 1), max_size=2)),
    min_size=1,
    max_size=8,
)
specs = st.builds(
    draft_spec,
    beam_width=st.integers(1, 5),
    branch=st.integers(1, 4),
    lead=st.integers(1, 6),
    max_nodes=st.sampled_from([6, 15, 1000]),
    min_path_logprob=st.sampled_from([-5.0, -1e9]),
    growth=st.sampled_from(sorted(RULES)),
    branch_below=st.sampled_from([0.0, 0.3, 1.0]),
    fan_out=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    num_speculative_tokens=st.integers(1, 3),
)


def known_children(model: TableModel, beam: BeamSequence) -> dict[tuple[int, ...], int]:
    """Return the paths of the children of expanded nodes, those included that are in the secondary tier only."""
    expanded = [tuple(beam.cache.path_tokens(node)) for node in beam.row_of]
    if beam.num_committed_rows == len(beam.token_ids):
        expanded.append(())
    return {
        (*path, token): -1
        for path in expanded
        for token in top(model.logits_after([*beam.token_ids, *path])[None], beam.spec.shape.branch)[0][0].tolist()
    }


def tokens_to_commit(beam: BeamSequence, which: int, length: int, others: list[int]) -> list[int]:
    alive = beam.cache.alive_ids()
    path = beam.cache.path_tokens(alive[which % len(alive)])[:length] if alive else []
    return path + others


@settings(max_examples=40)
@given(seed=st.integers(0, 99), spec=specs, turns=turns, overlap=st.integers(0, 3))
def test_rows_and_tree_are_those_of_the_text_after_any_corrections(
    seed: int, spec: DraftSpec, turns: list[tuple[int, int, int, list[int]]], overlap: int
) -> None:
    model = toy(seed)
    worker = worker_on(model)
    replica = Replica(TEXT, spec)
    replica.receive(worker.receive(Open(7, TEXT, spec)))
    beam = beam_of(worker)
    for num_passes, which, length, others in turns:
        for _ in range(num_passes):
            replica.receive(worker.step())
        tokens = tokens_to_commit(beam, which, length, others)
        start = max(0, len(beam.token_ids) - overlap)
        message = correction(start, beam.token_ids[start:] + tokens)
        epoch, survivors = beam.cache.epoch, {tuple(beam.cache.path_tokens(n)): n for n in beam.cache.alive_ids()}
        is_hit = not tokens or tuple(tokens) in survivors | known_children(model, beam)
        replica.commit(tokens)
        replica.receive(worker.receive(message))
        replica.assert_equals(beam)
        assert_rows_fit_the_tree(model, beam)
        assert_scores_are_those_of_the_model(model, beam)
        assert beam.cache.epoch == epoch + (not is_hit)
        if is_hit:
            below = {path: node for path, node in survivors.items() if path[: len(tokens)] == tuple(tokens)}
            below.pop(tuple(tokens), None)  # the root now
            assert all(beam.cache.path_tokens(node) == list(path[len(tokens) :]) for path, node in below.items())
        assert beam.cache.num_nodes <= spec.shape.max_nodes
        assert beam.cache.depth <= spec.shape.lead
    replica.receive(worker.step())
    replica.assert_equals(beam)


def make_llama() -> LlamaForCausalLM:
    return tiny_llama(V, hidden_size=16, intermediate_size=24, max_position_embeddings=64, initializer_range=0.5)


@pytest.mark.parametrize("own_pass", [True, False])
def test_a_real_kv_cache_is_that_of_a_fresh_prefill_after_any_corrections(own_pass: bool) -> None:
    runner = plain_runner(make_llama(), max_model_len=64, max_tree_rows=64, own_pass=own_pass)
    reference = make_llama()

    @settings(max_examples=6)
    @given(turns=turns)
    def check(turns: list[tuple[int, int, int, list[int]]]) -> None:
        worker = opened(runner, beam_width=3, lead=4)
        for turn in turns[:4]:
            take_turn(worker, *turn)
            check_rows(runner, reference, worker)
        worker.receive(Close(7))

    check()


def take_turn(worker: DrafterWorker, num_passes: int, which: int, length: int, others: list[int]) -> None:
    for _ in range(num_passes):
        worker.step()
    beam = beam_of(worker)
    worker.receive(correction(len(beam.token_ids), tokens_to_commit(beam, which, length, others)))


@torch.inference_mode()
def check_rows(runner: RowRunner, reference: LlamaForCausalLM, worker: DrafterWorker) -> None:
    """Check the rows' positions and keys, and that the next layer is what the model says of each path alone."""
    beam = beam_of(worker)
    cache, num_committed = beam.cache, beam.num_committed_rows
    positions = cache_of(runner)[beam.slot].tree.positions().tolist()
    assert positions[:num_committed] == list(range(num_committed))
    for node, row in beam.row_of.items():
        assert positions[row] == beam.root_position + cache.depth_of(node)  # the number of its ancestors
    before = set(cache.alive_ids())
    worker.step()  # its logits come from the rows that the corrections have left
    for node in set(cache.alive_ids()) - before:
        path = cache.path_tokens(node)
        text = torch.tensor([beam.token_ids + path[:-1]])
        expected = reference(text, use_cache=False).logits[0, -1].log_softmax(-1)[path[-1]]
        logprob = cache.path_logprob(node) - (cache.path_logprob(cache.parent(node)) if len(path) > 1 else 0.0)
        assert logprob == pytest.approx(float(expected), abs=1e-4)
    assert_kv_rows_equal_a_fresh_prefill(runner, beam)


def assert_kv_rows_equal_a_fresh_prefill(runner: RowRunner, beam: BeamSequence) -> None:
    num_rows = beam.num_committed_rows
    slot = runner.open()
    runner.forward([Extension(slot, beam.token_ids[:num_rows], [NO_PARENT, *range(num_rows - 1)])])
    kept, fresh = (kv_of(runner, i, num_rows) for i in (beam.slot, slot))
    np.testing.assert_allclose(kept, fresh, atol=1e-4, rtol=1e-4)
    runner.close(slot)


# ---- hit and miss ---------------------------------------------------------------------------------------------------


def test_a_hit_keeps_the_subtree_and_costs_no_pass() -> None:
    model = toy()
    worker = opened(model)
    for _ in range(3):
        worker.step()
    cache = beam_of(worker).cache
    first = max(cache.children(cache.root_id), key=lambda node: len(cache.children(node)))
    below, num_passes = set(cache.children(first)), model.num_forward_passes
    assert below
    layers = layers_of(worker.receive(correction(5, [cache.token(first)])))
    assert (cache.epoch, cache.root_id) == (0, first)
    assert below <= set(cache.children(first))
    assert model.num_forward_passes == num_passes
    assert all(not layer.is_reset for layer in layers), "what is told is only the refill"


def test_a_miss_starts_a_new_epoch_from_the_new_text() -> None:
    model = toy()
    worker = opened(model, branch=2)
    worker.step()
    beam = beam_of(worker)
    candidates = {beam.cache.token(node) for node in beam.cache.alive_ids()}
    missing = next(token for token in range(V) if token not in candidates)
    (reset,) = layers_of(worker.receive(correction(5, [missing])))
    assert (reset.is_reset, reset.epoch, len(reset.nodes), reset.root_position, reset.known_len) == (True, 1, 0, 5, 6)
    (layer,) = layers_of(worker.step())
    fresh = worker_on(toy())
    fresh.receive(Open(7, (*TEXT, missing), draft_spec(branch=2)))
    (expected,) = layers_of(fresh.step())
    assert (layer.nodes.tokens, layer.nodes.logprobs) == (expected.nodes.tokens, expected.nodes.logprobs)
    assert (layer.epoch, layer.is_reset, layer.root_id) == (1, False, reset.root_id)
    assert model.num_forward_tokens == 5 + 1, "the text is not run again"


# ---- lost, late and repeated messages -------------------------------------------------------------------------------


def test_a_correction_of_an_unknown_request_asks_for_everything() -> None:
    assert worker_on(toy()).receive(correction(4, [1], request_id=3)) == [Resync(3, None)]


def test_a_correction_that_does_not_connect_asks_for_the_text_between() -> None:
    worker = opened(toy())
    worker.step()
    before = beam_of(worker).cache.snapshot()
    assert worker.receive(correction(6, [1])) == [Resync(7, 5)]
    assert beam_of(worker).token_ids == list(TEXT)
    assert beam_of(worker).cache.snapshot() == before
    assert worker.receive(correction(5, [1, 2])) != [Resync(7, 5)]
    assert beam_of(worker).token_ids == [*TEXT, 1, 2]


def test_repeated_and_late_messages_change_nothing() -> None:
    worker = opened(toy())
    worker.step()
    worker.receive(correction(5, [9, 8]))
    worker.step()
    before = beam_of(worker).cache.snapshot()
    for late in (
        Open(7, TEXT, draft_spec()),
        Open(7, (*TEXT, 9, 8), draft_spec()),
        correction(5, [9]),
        correction(5, [9, 8]),
        correction(0, [*TEXT, 9]),
        correction(7, []),
    ):
        assert worker.receive(late) == []
        assert beam_of(worker).token_ids == [*TEXT, 9, 8]
        assert beam_of(worker).cache.snapshot() == before


def test_an_open_with_more_text_than_is_known_starts_a_new_epoch() -> None:
    model = toy()
    worker = opened(model)
    worker.step()
    (reset,) = layers_of(worker.receive(Open(7, (*TEXT, 2, 2), draft_spec())))
    assert (reset.is_reset, reset.epoch, reset.seq, reset.known_len) == (True, 1, 2, 7)
    assert len(model._sequences) == 1, "the rows of the first one are freed"
    assert len(worker.drafting) == 1


def test_a_snapshot_rebuilds_a_replica_that_lost_layers() -> None:
    worker = opened(toy())
    for _ in range(3):
        worker.step()
    token = beam_of(worker).cache.path_tokens(beam_of(worker).cache.alive_ids()[0])[0]
    snapshot = layers_of(worker.receive(correction(5, [token], wants_snapshot=True)))[-1]
    assert snapshot.is_reset
    replica = Replica([*TEXT, token], draft_spec())
    replica.next_seq = snapshot.seq
    replica.receive([snapshot])
    replica.assert_equals(beam_of(worker))
    replica.receive(worker.step())
    replica.assert_equals(beam_of(worker))
    (again,) = layers_of(worker.receive(correction(6, [], wants_snapshot=True)))
    assert again.nodes == beam_of(worker).cache.snapshot(), "asked for without new tokens, it comes too"


def test_a_closed_request_frees_its_rows_and_is_not_revived_by_late_messages() -> None:
    model = toy()
    worker = opened(model)
    worker.step()
    assert worker.receive(Close(7)) == []
    assert not model._sequences
    assert worker.receive(Open(7, TEXT, draft_spec())) == []
    assert worker.receive(correction(5, [1])) == [], "asking for it again would never end"
    assert worker.receive(Close(7)) == []
    assert not worker.drafting
    assert worker.step() == []
    assert worker.is_idle
    assert worker.receive(Close(8)) == [], "a close that overtakes its open"
    assert worker.receive(Open(8, TEXT, draft_spec())) == []
    assert not model._sequences
    assert worker.receive(Open(9, TEXT, draft_spec())) != []


# ---- no room --------------------------------------------------------------------------------------------------------


def full_worker(model: TableModel, num_texts: int, **settings: object) -> DrafterWorker:
    """Return a worker with memory for so many texts of any length."""
    writer = BeamWriter(model, kv_cache_bytes=num_texts * model.max_rows * model.row_bytes)
    return DrafterWorker(writer, clock=Clock(), **settings)  # type: ignore[arg-type]


def small() -> TableModel:
    return toy(max_model_len=64, num_tree_rows=64)


@pytest.mark.parametrize("is_memory", [True, False])
def test_a_request_that_finds_no_room_is_asked_for_when_there_is_some(is_memory: bool) -> None:
    model = small()
    worker = full_worker(model, 2) if is_memory else full_worker(model, 9, max_requests=2)
    for request_id in (1, 2):
        assert worker.receive(Open(request_id, TEXT, draft_spec()))
    assert worker.receive(Open(3, TEXT, draft_spec())) == []
    assert set(worker.drafting) == {1, 2}, "nobody who is alive makes place"
    for _ in range(5):
        assert worker.receive(correction(5, [4], request_id=3)) == [], "there is still no room"
    worker.receive(Close(1))
    assert worker.receive(correction(5, [4], request_id=3)) == [Resync(3, None)]
    (layer,) = layers_of(worker.receive(Open(3, (*TEXT, 4), draft_spec())))
    assert (layer.request_id, layer.seq, layer.known_len) == (3, 0, 6)
    assert worker.receive(correction(5, [4], request_id=1)) == [], "closed for good"


def test_a_request_that_its_target_has_forgotten_makes_place_and_may_come_back() -> None:
    model = small()
    worker = full_worker(model, 2)
    for request_id in (1, 2):
        worker.receive(Open(request_id, TEXT, draft_spec()))
    said = [layer.seq for layer in layers_of(worker.step() + worker.step()) if layer.request_id == 1]
    num_rounds = 0
    while worker.receive(Open(3, TEXT, draft_spec())) == []:
        assert set(worker.drafting) == {1, 2}
        worker.receive(correction(5, [], request_id=2))
        num_rounds += 1
        assert num_rounds < 1000
    assert num_rounds > 32, "a pause of a few rounds is not suspicious"
    assert set(worker.drafting) == {2, 3}
    assert worker.receive(correction(5, [4], request_id=1)) == []
    worker.receive(Close(2))
    assert worker.receive(correction(5, [4], request_id=1)) == [Resync(1, None)]
    (layer,) = layers_of(worker.receive(Open(1, (*TEXT, 4), draft_spec())))
    assert layer.seq == said[-1] + 1, "the target has seen the numbers before"
    assert (layer.is_reset, layer.epoch, layer.num_passes) == (True, 1, 2)


def test_a_text_that_no_memory_could_hold_is_never_asked_for() -> None:
    model = small()
    worker = DrafterWorker(BeamWriter(model, kv_cache_bytes=96 * model.row_bytes), clock=Clock())
    reason = "the text may take 128 KV rows, more than the drafter's memory holds"
    for message in (Open(1, TEXT, draft_spec()), correction(5, [4], request_id=1), Open(1, (*TEXT, 4), draft_spec())):
        assert worker.receive(message) == [Declined(1, reason)]
    assert layers_of(worker.receive(Open(2, TEXT, draft_spec(max_len=20)))), "a shorter one fits"


def test_a_text_that_no_memory_could_hold_takes_the_place_of_no_other() -> None:
    model = small()
    worker = DrafterWorker(BeamWriter(model, kv_cache_bytes=96 * model.row_bytes), clock=Clock())
    worker.receive(Open(2, TEXT, draft_spec(max_len=20)))
    for i in range(100):
        worker.receive(correction(5, [4], request_id=3 + i))  # so that the open one seems forgotten
    worker.receive(Open(1, TEXT, draft_spec()))
    assert set(worker.drafting) == {2}


def test_a_text_too_long_for_the_model_is_never_asked_for() -> None:
    worker = worker_on(toy(max_model_len=5))
    declined = Declined(7, "the text has 5 tokens, and the draft model's context holds 5")
    assert worker.receive(Open(7, TEXT, draft_spec())) == [declined]
    assert worker.receive(correction(5, [1])) == [declined], "the target may not have heard it"
    assert worker.receive(Close(7)) == worker.receive(correction(5, [1])) == []


def sharing(model: TableModel, num_texts: int, num_workers: int) -> list[DrafterWorker]:
    """Return workers that share memory for so many texts."""
    writer = BeamWriter(model, kv_cache_bytes=num_texts * model.max_rows * model.row_bytes)
    workers: list[DrafterWorker] = []
    clock = Clock()
    workers += [DrafterWorker(writer, clock=clock, peers=lambda: workers) for _ in range(num_workers)]
    return workers


def test_memory_goes_from_who_has_most_to_who_has_less_and_not_back() -> None:
    rich, poor = sharing(small(), 4, 2)
    for request_id in range(4):
        rich.receive(Open(request_id, TEXT, draft_spec()))
    assert poor.receive(Open(0, TEXT, draft_spec()))
    assert poor.receive(Open(1, TEXT, draft_spec()))
    assert (set(rich.drafting), set(poor.drafting)) == ({2, 3}, {0, 1}), "the oldest ones made place"
    assert poor.receive(Open(2, TEXT, draft_spec())) == []
    for _ in range(3):
        assert rich.receive(correction(5, [4], request_id=0)) == []
        assert rich.receive(Open(0, (*TEXT, 4), draft_spec())) == []
        assert poor.receive(correction(5, [4], request_id=2)) == []
    assert (set(rich.drafting), set(poor.drafting)) == ({2, 3}, {0, 1})


# ---- several workers ------------------------------------------------------------------------------------------------


def served(results: list[list[DrafterMessage]]) -> list[int]:
    """Return how many requests of each worker got a layer."""
    return [len(result) if isinstance(result, list) else -1 for result in results]


def test_workers_share_one_pass_and_each_gets_its_own_layers() -> None:
    model = toy()
    workers = sharing(model, 8, 3)
    for worker, request_ids in zip(workers, [(1, 2), (), (1,)], strict=True):
        for request_id in request_ids:
            worker.receive(Open(request_id, (request_id, 5), draft_spec()))
    assert served(step_together(workers)) == [2, 0, 1]
    assert model.num_forward_passes == 1
    assert [worker.is_idle for worker in workers] == [False, True, False]


def test_a_worker_with_many_requests_leaves_others_their_part_of_a_pass() -> None:
    model = toy()
    crowd, single = sharing(model, 40, 2)
    for request_id in range(30):
        crowd.receive(Open(request_id, TEXT, draft_spec(lead=200)))
    single.receive(Open(0, TEXT, draft_spec(lead=200)))
    for _ in range(20):
        tokens_before = model.num_forward_tokens
        of_crowd, of_single = served(step_together([crowd, single], max_tokens=16))
        assert of_single == 1, "its text, then four nodes a pass, fit into its half"
        assert model.num_forward_tokens - tokens_before == 16
        assert of_crowd >= 1, "what the other does not need is used"
    passes = [crowd.drafting[request_id].counters.num_passes for request_id in range(30)]
    assert min(passes) > 0 and max(passes) - min(passes) <= 1, "in turns among its own requests, too"


def test_whoever_is_left_out_of_a_pass_comes_first_in_the_next_one() -> None:
    workers = sharing(toy(), 20, 5)
    for worker in workers:
        worker.receive(Open(0, (1,), draft_spec(lead=200)))
    counts = [0] * 5
    for _ in range(10):
        counts = [count + new for count, new in zip(counts, served(step_together(workers, max_tokens=2)), strict=True)]
    assert counts == [4] * 5


def test_a_long_text_is_run_in_parts_between_the_layers_of_others() -> None:
    model = toy()
    reader, drafter = sharing(model, 8, 2)
    drafter.receive(Open(0, TEXT, draft_spec(lead=100, beam_width=4)))
    step_together([reader, drafter])
    reader.receive(Open(0, tuple(i % 12 for i in range(100)), draft_spec()))
    results = [served(step_together([reader, drafter], max_tokens=24)) for _ in range(6)]
    assert results == [[0, 1]] * 4 + [[1, 1]] * 2, "20 tokens of the text beside 4 nodes"


def test_a_worker_alone_runs_a_long_text_in_parts_if_told_to() -> None:
    worker = DrafterWorker(BeamWriter(toy()), clock=Clock(), max_tokens_per_pass=30)
    worker.receive(Open(0, tuple(i % 12 for i in range(100)), draft_spec()))
    assert [len(worker.step()) for _ in range(4)] == [0, 0, 0, 1]


def test_scores_that_are_no_numbers_are_the_end_of_their_request_alone() -> None:
    one, other = sharing(toy(), 8, 2)
    one.receive(Open(0, TEXT, draft_spec(temperature=1e-320)))
    one.receive(Open(1, TEXT, draft_spec()))
    other.receive(Open(0, TEXT, draft_spec()))
    (declined, layer), layers = step_together([one, other])
    assert isinstance(declined, Declined) and declined.request_id == 0
    assert "the draft model failed at it: " in declined.reason and "must be numbers" in declined.reason
    assert isinstance(layer, Layer) and layer.request_id == 1
    assert len(layers_of(layers)) == 1
    assert set(one.drafting) == {1}


class Poisoned(TableModel):
    """Raises at every pass with a token of one kind in it."""

    bad_token = V - 1

    def forward(self, extensions: Sequence[Extension]) -> list[Tensor]:
        if any(self.bad_token in extension.token_ids for extension in extensions):
            raise RuntimeError("out of memory\nand a long story")
        return super().forward(extensions)


def test_a_pass_that_fails_is_the_end_of_the_request_that_it_fails_for_alone() -> None:
    worker, model = worker_on(Poisoned(0, V, 3, spread=1.0, num_tree_rows=512)), toy()
    alone = worker_on(model)
    for i in (1, 2, 3, 4, 5):
        text = (*TEXT, V - 1) if i == 3 else (i, *TEXT)
        worker.receive(Open(i, text, draft_spec(beam_width=1, branch=1)))
        if i != 3:
            alone.receive(Open(i, text, draft_spec(beam_width=1, branch=1)))
    said = worker.step()
    assert [m for m in said if isinstance(m, Declined)] == [
        Declined(3, "the draft model failed at it: RuntimeError: out of memory")
    ]
    assert [(m.request_id, m.nodes) for m in said if isinstance(m, Layer)] == [
        (m.request_id, m.nodes) for m in layers_of(alone.step())
    ]
    assert set(worker.drafting) == {1, 2, 4, 5}
    assert len(worker.writer.model._sequences) == 4, "the rows of the failed one serve nobody"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["num_tokens_to_run", "grow", "commit"])
def test_an_error_that_nobody_thought_of_is_the_end_of_its_request_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(BeamSequence, name)

    def fail(self: BeamSequence, *args: Any) -> Any:
        if self.token_ids[0] == 3:
            raise IndexError("list index out of range\nand a long story")
        return whole(self, *args)

    workers = sharing(toy(), 8, 2)
    for request_id in (1, 3):
        workers[0].receive(Open(request_id, (request_id, *TEXT), draft_spec()))
    workers[1].receive(Open(1, (4, *TEXT), draft_spec()))
    monkeypatch.setattr(BeamSequence, name, fail)
    said = workers[0].receive(Correction(3, 1, 1 + len(TEXT), (1,), wants_snapshot=False))
    passed = step_together(workers)
    declined = [message for message in [*said, *passed[0]] if isinstance(message, Declined)]
    assert [message.request_id for message in declined] == [3]
    assert declined[0].reason.endswith("IndexError: list index out of range")
    assert [[m.request_id for m in one if isinstance(m, Layer)] for one in passed] == [[1], [1]]


def test_a_model_that_fails_for_good_in_the_middle_of_a_pass_takes_no_layers_of_others_with_it() -> None:
    model = Poisoned(0, V, 3, spread=1.0, num_tree_rows=512)
    worker = worker_on(model)
    for i in (1, 2):
        worker.receive(Open(i, (V - 1 if i == 2 else i, *TEXT), draft_spec(beam_width=1, branch=1)))
    model.bad_token = V - 1

    def check() -> None:
        raise RuntimeError("out of memory")

    worker.writer.check = check  # type: ignore[method-assign]
    said = worker.step()
    assert [m.request_id for m in said if isinstance(m, Declined)] == [2]
    assert [m.request_id for m in said if isinstance(m, Layer)] == [1]


def test_a_model_that_runs_no_text_at_all_raises() -> None:
    model = Poisoned(0, V, 3, spread=1.0, num_tree_rows=512)
    model.bad_token = 0  # that of the trial, too
    worker = worker_on(model)
    worker.receive(Open(1, (0, 1, 2), draft_spec()))
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.step()


def test_a_draft_model_with_more_tokens_than_the_target_proposes_none_of_them() -> None:
    worker = opened(toy(), vocab_size=4, beam_width=6, branch=6)
    tokens = {token for _ in range(4) for layer in layers_of(worker.step()) for token in layer.nodes.tokens}
    assert tokens and max(tokens) < 4
    model = toy(seed=3)
    whole = opened(model, beam_width=1, branch=1)
    assert layers_of(opened(model, beam_width=1, branch=1, vocab_size=V + 7).step()) == layers_of(whole.step())


# ---- passes ---------------------------------------------------------------------------------------------------------


def test_one_pass_drafts_for_all_requests_and_its_time_is_shared() -> None:
    model = toy()
    worker = worker_on(model)
    for request_id in (1, 2):
        worker.receive(Open(request_id, (request_id, 5), draft_spec()))
    layers = layers_of(worker.step())
    assert model.num_forward_passes == 1
    assert [(layer.request_id, layer.num_passes, layer.busy_s) for layer in layers] == [(1, 1, 0.5), (2, 1, 0.5)]
    worker.receive(Close(1))
    (layer,) = layers_of(worker.step())
    assert (layer.request_id, layer.num_passes, layer.busy_s) == (2, 2, 1.5)


@pytest.mark.parametrize("changes", [{"lead": 3}, {"max_nodes": 5}])
def test_growth_is_bounded_and_then_the_worker_is_idle(changes: dict[str, int]) -> None:
    model = toy()
    worker = opened(model, **changes)
    for _ in range(100):
        worker.step()
    assert worker.is_idle
    assert beam_of(worker).cache.depth <= changes.get("lead", 6)
    assert beam_of(worker).cache.num_nodes <= changes.get("max_nodes", 1000)
    num_passes = model.num_forward_passes
    assert worker.step() == []
    assert model.num_forward_passes == num_passes
    worker.receive(correction(5, beam_of(worker).cache.path_tokens(beam_of(worker).cache.alive_ids()[0])[:1]))
    assert not worker.is_idle, "a committed token makes room for a layer"


def test_the_end_of_the_context_makes_it_idle_and_raises_nothing() -> None:
    model = toy(max_model_len=8)
    worker = opened(model, lead=20)
    for token in (1, 2):
        for _ in range(6):
            worker.step()
        layers_of(worker.receive(correction(len(beam_of(worker).token_ids), [token])))
    declined = Declined(7, "the text has 8 tokens, and the draft model's context holds 8")
    assert worker.receive(correction(7, [3])) == [declined]
    assert not worker.drafting, "others may have its memory"
    assert worker.step() == []
    assert worker.is_idle
    empty = worker_on(toy(max_model_len=5))
    assert empty.receive(Open(8, (), draft_spec())) == []
    assert empty.step() == []


@pytest.mark.parametrize("growth", sorted(RULES))
def test_layers_count_the_nodes_that_corrections_have_ruled_out(growth: str) -> None:
    worker = opened(toy(), growth=growth, beam_width=3, branch=4, branch_below=1.0)
    for _ in range(4):
        worker.step()
    beam, num_dropped, num_rolled_back = beam_of(worker), 0, 0
    for tokens in ([beam.cache.query(1, "chain").tokens[0]], [V - 1, V - 1]):  # a hit, a miss
        num_rolled_back += beam.cache.num_rolled_back(tokens)
        alive, on_path = beam.cache.num_nodes, len(beam.cache.walk(tokens))
        below = [node for node in beam.cache.alive_ids() if beam.cache.path_tokens(node)[: len(tokens)] == tokens]
        num_dropped += alive - max(len(below), on_path)
        (layer, *_) = layers_of(worker.receive(correction(len(beam.token_ids), tokens))) or layers_of(worker.step())
        assert (layer.num_dropped, layer.num_rolled_back) == (num_dropped, num_rolled_back)
    assert num_dropped > num_rolled_back > 0
    beam_again = worker.receive(Open(7, (*beam.token_ids, 1), beam.spec))
    (layer,) = layers_of(beam_again)
    counts = (layer.num_dropped, layer.num_rolled_back)
    assert counts == (num_dropped, num_rolled_back), "those of a beam that was replaced count on"


# ---- protocol -------------------------------------------------------------------------------------------------------


def test_a_correction_changes_the_width_and_what_is_unsure_and_nothing_that_it_does_not_name() -> None:
    worker = opened(toy(), beam_width=2, lead=2)
    before = beam_of(worker).spec.shape
    worker.receive(correction(5, [], beam_width=3))
    assert beam_of(worker).spec.shape == replace(before, beam_width=3)
    worker.receive(correction(5, [], branch_below=0.0))
    assert beam_of(worker).spec.shape == replace(before, beam_width=3, branch_below=0.0)
    worker.receive(correction(5, []))
    assert beam_of(worker).spec.shape == replace(before, beam_width=3, branch_below=0.0)


def test_a_correction_that_a_newer_one_overtook_changes_nothing() -> None:
    worker = opened(toy(), growth="branch", branch_below=0.5)
    worker.step()
    older, newer = correction(5, [1], branch_below=1.0), correction(5, [1, 2], branch_below=0.25)
    worker.receive(newer)
    worker.receive(older)
    assert beam_of(worker).spec.shape.branch_below == 0.25
    assert beam_of(worker).token_ids[5:] == [1, 2]


@pytest.mark.parametrize(("branch_below", "num_heads"), [(0.0, 1), (1.0, 2)])
def test_what_is_unsure_is_that_of_the_tokens_that_it_comes_with(branch_below: float, num_heads: int) -> None:
    unsure = TableModel(0, V, 3, spread=0.1, num_tree_rows=512)
    worker = opened(unsure, growth="branch", beam_width=3, branch=4, branch_below=0.5)
    for _ in range(4):
        worker.step()
    beam = beam_of(worker)
    head = beam.cache.query(1, "chain").tokens[0]
    worker.receive(correction(5, [head], branch_below=branch_below))
    assert len(beam.cache.children(beam.cache.root_id)) == num_heads, "no pass was needed"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Open(8, TEXT, draft_spec(branch=0)), "branch of a draft spec must be from 1 to 256"),
        (correction(5, [1], beam_width=257), "beam_width of a correction must be from 1 to 256"),
        (correction(5, [1], beam_width=0), "beam_width of a correction must be from 1 to 256"),
        (correction(5, [1], branch_below=-0.5), "branch_below of a correction must be from 0 to 1"),
        (correction(5, [1], branch_below=1.5), "branch_below of a correction must be from 0 to 1"),
        (correction(5, [1], branch_below=math.nan), "branch_below of a correction must be from 0 to 1"),
        (correction(-2, [1]), "start of a correction must be 0 or more"),
        (correction(5, [1, 1, 1]), "has 8 tokens; .* it gets 7 at most"),
    ],
)
def test_what_is_out_of_bounds_is_refused_and_changes_nothing(message: Open | Correction, reason: str) -> None:
    worker = opened(toy(), max_len=7)
    with pytest.raises(ProtocolError, match=reason):
        worker.receive(message)
    assert (len(worker.drafting), beam_of(worker).token_ids) == (1, list(TEXT))


def test_a_correction_that_repeats_much_is_acknowledged_so_that_it_gets_shorter() -> None:
    worker = opened(toy(max_model_len=256))
    text = list(TEXT)
    known_len, longest = len(text), 0
    for round_idx in range(200):
        text.append(round_idx % V)
        longest = max(longest, len(text) - known_len)
        for layer in layers_of(worker.receive(correction(known_len, text[known_len:])) + worker.step()):
            known_len = layer.known_len
    assert longest <= 64


@pytest.mark.parametrize("bad", [-1, V, 10**12])
def test_a_token_that_the_model_lacks_is_the_end_of_its_request_alone(bad: int) -> None:
    model = toy()
    worker = opened(model)
    worker.receive(Open(9, TEXT, draft_spec()))
    worker.step()
    before = beam_of(worker).cache.snapshot()
    reason = f"the draft model has no token {bad}: its tokens are 0 to {V - 1}"
    assert worker.receive(Open(8, (1, bad), draft_spec())) == [Declined(8, reason)]
    assert worker.receive(correction(5, [1, bad], request_id=9)) == [Declined(9, reason)]
    assert worker.receive(correction(5, [1, bad, 2], request_id=9)) == [Declined(9, reason)]
    assert beam_of(worker).token_ids == list(TEXT)
    assert beam_of(worker).cache.snapshot() == before
    assert layers_of(worker.step())[0].request_id == 7
    assert worker.receive(Open(7, (*TEXT, bad, 1), draft_spec())) == [Declined(7, reason)]
    assert not worker.drafting


anything = st.one_of(messages, messages, st.builds(Open, st.integers(0, 9), id_lists, specs))


@settings(max_examples=75)
@given(said=st.lists(anything, min_size=1, max_size=6))
def test_whatever_a_target_says_of_other_requests_a_request_is_drafted_on(said: list[Any]) -> None:
    worker, alone = opened(toy(), beam_width=2), opened(toy(), beam_width=2)
    for message in said:
        if getattr(message, "request_id", None) == 7 or isinstance(message, Shutdown):
            continue
        with contextlib.suppress(ProtocolError):
            worker.receive(message)
        of_it = [one for one in worker.step() if isinstance(one, Layer) and one.request_id == 7]
        assert [layer.nodes for layer in of_it] == [layer.nodes for layer in layers_of(alone.step())]


def test_a_ping_is_answered_and_a_shutdown_frees_everything() -> None:
    model = toy()
    worker = opened(model)
    assert worker.receive(Ping(41)) == [Pong(41)]
    assert not worker.is_shut_down
    assert worker.receive(Shutdown()) == []
    assert worker.is_shut_down
    assert not model._sequences
    assert worker.receive(Shutdown()) == []


def test_a_message_that_no_target_sends_is_refused() -> None:
    with pytest.raises(ProtocolError, match="accepts only messages of a target"):
        worker_on(toy()).receive(Pong(1))  # type: ignore[arg-type]


def test_a_writers_memory_is_a_share_of_what_is_free_and_one_text_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableModel(0, V, max_model_len=1000, num_tree_rows=0, row_bytes=100)
    for free_bytes, num_texts in ((1 << 40, 16), (16 * 500_000, 5), (1000, 1)):
        monkeypatch.setattr(beam, "free_memory", lambda free_bytes=free_bytes: free_bytes)
        pool = BeamWriter(model).pool
        opened = 0
        while pool.has_room(1000):
            pool.open([], 1000)
            opened += 1
        assert opened == num_texts
