"""The product: every method gives the text of plain decoding, whatever the drafter is and whatever happens to it."""

from __future__ import annotations

import time
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, Growth, SamplingParams, VerifyShape
from card.engine.engine import Engine
from card.engine.target import TargetWorker
from tests.decoding import (
    GREEDY,
    assert_plain_in_turns,
    assert_plain_under_any_order,
    decode,
    drafter_for,
    fake,
    inline,
    make_request,
    plain,
    run_all,
    toy_draft,
    toy_target,
)
from tests.examples import settings
from tests.unreliable_link import Faults

sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**40),
    max_tokens=st.integers(1, 40),
)
shapes = st.builds(
    DraftSettings,
    verify=st.sampled_from(["chain", "tree"]),
    beam_width=st.sampled_from([1, 2, 16, 64]),
    branch=st.integers(1, 6),
    budget=st.integers(1, 12),
    lead=st.integers(1, 8),
    num_speculative_tokens=st.integers(1, 6),
    growth=st.sampled_from(get_args(Growth)),
    branch_below=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    fan_out=st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
    coupled_noise=st.booleans(),
)
faults = st.builds(
    Faults,
    seed=st.integers(0, 2**31),
    drop=st.sampled_from([0.0, 0.2, 0.9]),
    duplicate=st.sampled_from([0.0, 0.3]),
    max_delay=st.integers(0, 4),
    kill=st.sampled_from([0.0, 0.1]),
    max_passes=st.integers(0, 6),
)
agreements = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@settings(max_examples=75)
@given(seed=st.integers(0, 99), agreement=agreements, params=sampling, shape=shapes, faults=faults)
def test_text_is_that_of_plain_decoding_under_any_message_order(**drawn):
    stats = assert_plain_under_any_order(drafter_for, **drawn)
    assert 0 <= stats.hits + stats.late_hits <= stats.target_passes, "a verification has one next token"


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    agreement=agreements,
    params=sampling,
    shape=shapes,
    method=st.sampled_from(["sps", "card"]),
)
def test_text_is_that_of_plain_decoding_when_taking_turns(**drawn):
    assert_plain_in_turns(drafter_for, **drawn)


@pytest.mark.parametrize("growth", get_args(Growth))
@pytest.mark.parametrize("make_link", [inline, fake])
@pytest.mark.parametrize("verify", get_args(VerifyShape))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_plain_decoding_by_whatever_rule_the_tree_grows(growth, make_link, verify, temperature):
    target = toy_target()
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60)
    shape = DraftSettings(growth=growth, verify=verify, lead=16, num_speculative_tokens=3, budget=8)
    token_ids, reason, stats = decode(target, make_link(toy_draft(target, 0.8)), params=params, draft=shape)
    assert (token_ids, reason) == plain(target, params=params)
    assert stats.accepted_tokens > 0 or (verify == "trunk" and growth != "branch"), "other rules branch at once"
    assert stats.drafter_dropped_nodes > 0, "what the target did not choose"


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99),
    shape=shapes,
    ends=st.frozensets(st.integers(0, 11), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_text_ends_at_the_same_end_token(seed, shape, ends, temperature):
    target = toy_target(seed)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=60)
    token_ids, reason, _ = decode(target, fake(toy_draft(target, 0.9)), params=params, draft=shape, end_ids=ends)
    assert (token_ids, reason) == plain(target, params=params, end_ids=ends)
    assert not ends & set(token_ids[:-1])
    assert (token_ids[-1] in ends) == (reason == "stop")


@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("beam_width", [1, 2, 16, 64])
def test_perfect_drafter_is_accepted_always(verify, temperature, beam_width):
    target = toy_target()
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=61)
    shape = DraftSettings(verify=verify, beam_width=beam_width, budget=4, num_speculative_tokens=4)
    _, _, stats = decode(target, inline(toy_draft(target, 1.0)), method="sps", params=params, draft=shape)
    assert stats.accepted_tokens == stats.verified_tokens > 0
    assert stats.mean_acceptance_length == 5
    running_ahead = fake(toy_draft(target, 1.0), Faults(max_passes=16))
    _, _, stats = decode(target, running_ahead, params=params, draft=shape)
    if verify == "chain":
        assert stats.accepted_tokens == stats.verified_tokens > 0
    assert stats.hit_rate > 0.5, "in a third of the rounds it made too few passes to be ahead"


def test_without_coupled_noise_a_perfect_drafter_is_not_always_accepted_at_temperature_1():
    target = toy_target()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=61)
    accepted = {}
    for coupled in (False, True):
        shape = DraftSettings(coupled_noise=coupled)
        _, _, stats = decode(target, inline(toy_draft(target, 1.0)), method="sps", params=params, draft=shape)
        accepted[coupled] = stats.acceptance_rate
    assert accepted[True] == 1.0
    assert accepted[False] < 0.9


def test_adversarial_drafter_is_never_accepted_in_a_chain_of_one():
    target = toy_target()
    draft = DraftSettings(num_speculative_tokens=1)
    _, _, stats = decode(target, inline(toy_draft(target, 0.0)), method="sps", draft=draft)
    assert stats.accepted_tokens == 0
    assert stats.mean_acceptance_length == 1


@settings(max_examples=40)
@given(room=st.integers(1, 20), agreement=agreements, shape=shapes, num_tree_rows=st.integers(0, 8))
def test_text_near_the_context_limit_is_that_of_plain_decoding(room, agreement, shape, num_tree_rows):
    target = toy_target(max_model_len=5 + room, num_tree_rows=num_tree_rows)
    draft = toy_draft(target, agreement)
    token_ids, reason, _ = decode(target, fake(draft), draft=shape, params=GREEDY)
    assert (token_ids, reason) == plain(target, params=GREEDY)
    assert reason == "length"
    assert len(token_ids) == room


def test_all_slots_and_trees_are_freed_when_a_request_ends():
    target = toy_target()
    draft = toy_draft(target, 0.9)
    worker_link = inline(draft)
    engine = Engine(TargetWorker(target, clock=time.perf_counter), worker_link)
    run_all(engine, {0: [make_request(1), make_request(2)]})
    assert not worker_link.worker.drafting
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_open_sequences) == (0, 0, 0)
    assert len(target._sequences) == stats.kv_retained_sequences == 1, "the same text is kept once"
    engine.forget_prefixes()
    assert not target._sequences
