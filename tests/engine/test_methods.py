"""Every method, with its writers and others besides, gives the text of plain decoding: alone, batched, with faults."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.config.registry import methods
from card.engine.queue import Limits
from card.engine.sequence import Work
from card.engine.target import TargetWorker
from tests.decoding import decode, fake, inline, make_engine, make_request, plain, run_all, toy_draft, toy_target
from tests.examples import settings
from tests.figures import check_request
from tests.local_writing import WRITERS
from tests.unreliable_link import Faults

ANY = sorted(name for name, method in methods().items() if not method.needs_head)
DRAFTING = sorted(name for name, method in methods().items() if method.needs_draft)
PARALLEL = sorted(name for name, method in methods().items() if method.needs_draft and method.placement != "inline")
ALONE = sorted(name for name, method in methods().items() if not (method.needs_draft or method.needs_head))

agreements = st.sampled_from([0.0, 0.6, 0.9, 1.0])
some_writers = st.lists(st.sampled_from(WRITERS), unique=True, max_size=len(WRITERS)).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**40),
    max_tokens=st.integers(1, 60),
)
shapes = st.builds(
    DraftSettings,
    budget=st.integers(1, 40),
    beam_width=st.integers(1, 6),
    branch=st.integers(1, 4),
    num_speculative_tokens=st.integers(1, 6),
    branch_below=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    fan_out=st.sampled_from([(1,), (3, 2, 1), (0, 2)]),
    waits_after_miss=st.booleans(),
)
faults = st.builds(
    Faults,
    seed=st.integers(0, 2**31),
    drop=st.sampled_from([0.0, 0.3]),
    duplicate=st.sampled_from([0.0, 0.3]),
    max_delay=st.integers(0, 3),
    kill=st.sampled_from([0.0, 0.1]),
    max_passes=st.integers(0, 6),
)


@settings(max_examples=75)
@given(
    method=st.sampled_from(DRAFTING),
    seed=st.integers(0, 99),
    agreement=agreements,
    params=sampling,
    shape=shapes,
    faults=faults,
    writers=some_writers,
)
def test_text_is_that_of_plain_decoding_under_any_message_order(
    method, seed, agreement, params, shape, faults, writers
):
    target = toy_target(seed)
    link = fake(toy_draft(target, agreement), faults)
    token_ids, reason, stats = decode(target, link, method=method, params=params, draft=shape, writers=writers)
    assert (token_ids, reason) == plain(target, params=params)
    check_request(stats, has_clock=False)
    assert not link.status.reason, "no message of an honest drafter is rejected"


@settings(max_examples=75)
@given(method=st.sampled_from(ALONE), seed=st.integers(0, 99), params=sampling, shape=shapes, writers=some_writers)
def test_text_is_that_of_plain_decoding_without_a_drafter(method, seed, params, shape, writers):
    target = toy_target(seed)
    token_ids, reason, stats = decode(target, None, method=method, params=params, draft=shape, writers=writers)
    assert (token_ids, reason) == plain(target, params=params)
    check_request(stats, has_clock=False)


@settings(max_examples=30)
@given(
    method=st.sampled_from(ANY),
    seed=st.integers(0, 99),
    agreement=agreements,
    shape=shapes,
    faults=faults,
    num_requests=st.integers(1, 8),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_each_text_of_a_batch_is_that_of_plain_decoding_alone(
    method, seed, agreement, shape, faults, num_requests, max_num_seqs, temperature
):
    target = toy_target(seed)
    link = fake(toy_draft(target, agreement), faults) if methods()[method].needs_draft else None
    engine = make_engine(target, link, method, limits=Limits(max_num_seqs=max_num_seqs, prefill_chunk=4))
    requests = [
        make_request(
            i,
            method=method,
            draft=shape,
            prompt=tuple((i + j) % 12 for j in range(3 + i)),
            params=SamplingParams(temperature=temperature, seed=i, max_tokens=25),
            uses_drafter=link is not None,
        )
        for i in range(num_requests)
    ]
    texts = run_all(engine, {i: [request] for i, request in enumerate(requests)})
    assert texts == {r.request_id: plain(toy_target(seed), params=r.params, prompt=r.prompt_ids) for r in requests}
    assert engine.stats().kv_open_sequences == 0


@pytest.mark.parametrize("method", [name for name in DRAFTING if name != "specbranch"])
def test_a_perfect_drafter_gives_more_than_one_token_a_pass(method):
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=80)
    link = fake(toy_draft(target, 1.0), Faults(max_passes=8))
    _, _, stats = decode(target, link, method=method, params=params, draft=DraftSettings(num_speculative_tokens=4))
    assert stats.mean_acceptance_length > 2


@pytest.mark.parametrize("method", [name for name in ALONE if name != "vanilla"])
def test_without_a_drafter_a_text_that_repeats_itself_gives_more_than_one_token_a_pass(method):
    target = toy_target()  # greedy text over twelve tokens soon runs in a circle
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=110)
    _, _, stats = decode(target, None, method=method, params=params)
    assert stats.mean_acceptance_length > 1.3
    assert set(stats.accepted_by_writer) == {"self" if methods()[method].selection else method}


def test_statistics_say_what_each_writer_earned():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=100)
    link = fake(toy_draft(target, 0.9), Faults(max_passes=8))
    _, _, stats = decode(target, link, params=params, writers=("suffix",))
    assert sum(stats.verified_by_writer.values()) == stats.verified_tokens
    assert sum(stats.accepted_by_writer.values()) == stats.accepted_tokens
    assert stats.accepted_by_writer["beam+suffix"] > 0, "both know the circle that the text runs in"


def test_pearl_verifies_the_first_draft_of_a_block_by_the_pass_before_it():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=81)
    link = fake(toy_draft(target, 1.0), Faults(max_passes=8))
    _, _, stats = decode(target, link, method="pearl", params=params, draft=DraftSettings(num_speculative_tokens=5))
    assert len(stats.offered_per_depth) == 4, "of a block of five one is verified before the block is complete"
    assert stats.accepted_tokens == stats.verified_tokens > 0


def test_pearl_does_not_wait_for_drafts_after_a_rejection():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40)
    _, _, stats = decode(target, inline(toy_draft(target, 0.0)), method="pearl", params=params)
    assert stats.accepted_tokens == 0


@pytest.mark.parametrize(("runs_by_itself", "schedule"), [(None, "off"), (False, "turns"), (True, "beside")])
def test_an_engine_without_a_policy_drafts_as_its_link_does(runs_by_itself, schedule):
    target = toy_target()
    link = None if runs_by_itself is None else fake(toy_draft(target, 0.8))
    if link:
        link.runs_by_itself = runs_by_itself
    assert decode(target, link)[2].schedule == schedule


@pytest.mark.parametrize("method", PARALLEL)
def test_a_parallel_method_goes_on_plainly_when_its_drafter_says_nothing(method):
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=20)
    shape = DraftSettings(num_speculative_tokens=3)
    link = fake(toy_draft(target, 1.0), Faults(drop=1.0))
    token_ids, _, stats = decode(target, link, method=method, params=params, draft=shape)
    assert token_ids == plain(target, params=params)[0]
    assert stats.accepted_tokens == 0


@pytest.mark.parametrize("method", DRAFTING)
def test_no_candidates_are_waited_for_that_the_text_has_no_room_for(method):
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=12)
    shape = DraftSettings(num_speculative_tokens=8)
    worker = TargetWorker(target, clock=time.perf_counter)
    sequence = worker.add(worker.check(make_request(7, method=method, params=params, draft=shape)))
    worker.step([Work(sequence, num_prompt_tokens=100)])
    for _ in range(10):
        worker.step([Work(sequence)])  # plainly: eleven of twelve tokens are there
    assert not sequence.is_short_of_candidates
