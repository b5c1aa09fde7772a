"""Continuous batching: many requests at once, each with the text that it has alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.engine.engine import Engine
from card.engine.policy.rounds import Policy
from card.engine.queue import Limits
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.errors import CapacityError, PromptError, TargetError, WorkerError
from card.links.link import DrafterLink
from card.machine.threads import CoreSet
from tests.decoding import GREEDY, fake, inline, make_request, plain, run_all, toy_draft, toy_target
from tests.examples import settings
from tests.toy import TableModel
from tests.unreliable_link import Faults


def make_engine(
    target: TableModel, link: DrafterLink | None, *, max_kv_rows: int | None = None, **limits: int
) -> Engine:
    worker = TargetWorker(
        target,
        clock=time.perf_counter,
        max_kv_bytes=None if max_kv_rows is None else max_kv_rows * target.row_bytes,
    )
    return Engine(worker, link, limits=Limits(**limits))


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 7 + i * i) % 12 for i in range(length))


request_draws = st.tuples(
    st.integers(1, 60),  # prompt length
    st.integers(1, 30),  # max_tokens
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 12),  # round of arrival
)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99),
    drawn=st.lists(request_draws, min_size=1, max_size=16),
    method=st.sampled_from(["vanilla", "sps", "card"]),
    agreement=st.sampled_from([0.0, 0.8, 1.0]),
    max_num_seqs=st.sampled_from([1, 4, 16]),
    prefill_chunk=st.sampled_from([1, 5, 64]),
    faults=st.one_of(
        st.none(),
        st.builds(
            Faults,
            seed=st.integers(0, 999),
            drop=st.sampled_from([0.0, 0.3]),
            duplicate=st.sampled_from([0.0, 0.3]),
            max_delay=st.integers(0, 3),
            kill=st.sampled_from([0.0, 0.1]),
        ),
    ),
)
def test_each_text_is_that_of_plain_decoding_alone(seed, drawn, method, agreement, max_num_seqs, prefill_chunk, faults):
    target, draft = toy_target(seed), toy_draft(toy_target(seed), agreement)
    link = None if method == "vanilla" else inline(draft) if faults is None else fake(draft, faults)
    engine = make_engine(target, link, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk)
    arrivals: dict[int, list[Request]] = {}
    requests = []
    for i, (length, max_tokens, temperature, arrival) in enumerate(drawn):
        request = make_request(
            i,
            method=method,
            prompt=prompt_of(seed + i % 3, length),  # some begin alike
            params=SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens),
            draft=DraftSettings(verify="tree" if i % 2 else "chain", budget=5, lead=6, min_verify_prob=0.0),
            end_ids=frozenset({i % 12}),
            uses_drafter=link is not None,
        )
        requests.append(request)
        arrivals.setdefault(arrival, []).append(request)
    texts = run_all(engine, arrivals)
    assert texts == {
        r.request_id: plain(toy_target(seed), params=r.params, prompt=r.prompt_ids, end_ids=r.end_ids) for r in requests
    }
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_open_sequences) == (0, 0, 0)
    assert stats.num_finished == len(requests)


def test_all_that_decode_share_one_pass_per_round():
    target = toy_target()
    engine = make_engine(target, None)
    run_all(engine, {0: [make_request(i, method="vanilla", uses_drafter=False) for i in range(8)]})
    assert target.num_forward_passes == GREEDY.max_tokens
    assert engine.stats().rounds == GREEDY.max_tokens


def test_a_long_prompt_is_read_in_chunks_while_others_get_a_token_each_round():
    target = toy_target(max_model_len=256)
    engine = make_engine(target, None, prefill_chunk=10)
    engine.add(
        engine.check(make_request(1, method="vanilla", uses_drafter=False, params=GREEDY.replace(max_tokens=30)))
    )
    engine.step()
    engine.add(engine.check(make_request(2, method="vanilla", uses_drafter=False, prompt=prompt_of(5, 95))))
    rounds_before_it_speaks = 0
    while 2 not in (ids := {update.request_id for update in engine.step()}):
        assert ids == {1}, "the one that runs goes on streaming"
        rounds_before_it_speaks += 1
    assert rounds_before_it_speaks == 9, "95 tokens, 10 a round; the last chunk brings the first token"


@pytest.mark.parametrize("method", ["vanilla", "card"])
def test_of_a_prompt_each_token_is_run_once_and_only_the_last_one_has_logits(method):
    target, passes = toy_target(max_model_len=2048), []
    forward = target.forward
    target.forward = lambda parts: (
        passes.append([(len(part.token_ids), len(part.token_ids) - part.first_logits_idx) for part in parts]),
        forward(parts),
    )[1]
    link = inline(toy_draft(target, 1.0)) if method == "card" else None
    engine = make_engine(target, link)
    asked = make_request(1, method=method, prompt=prompt_of(5, 1100), uses_drafter=link is not None)
    engine.add(engine.check(asked))
    while not engine.step():
        pass
    assert passes == [[(512, 0)], [(512, 0)], [(76, 1)]], "whatever is drafted meanwhile, no pass of a prompt runs it"


@pytest.mark.parametrize("length, is_long", [(255, False), (256, True), (300, True)])
def test_a_long_prompt_is_read_on_the_cores_for_reading_and_nothing_else_is(length, is_long):
    target = toy_target(0, max_model_len=400)
    passes: list[tuple[int, int]] = []
    forward = target.forward
    target.forward = lambda parts: (
        passes.append((torch.get_num_threads(), sum(len(part.token_ids) for part in parts))),
        forward(parts),
    )[1]
    policy = Policy("off", CoreSet(threads=2))
    policy.reading_cores = CoreSet(threads=3)
    engine = Engine(TargetWorker(target, clock=time.perf_counter), None, policy=policy)
    first = make_request(0, prompt=prompt_of(0, length), params=GREEDY.replace(max_tokens=4))
    late = make_request(1, prompt=prompt_of(1, 300), params=GREEDY.replace(max_tokens=4))
    run_all(engine, {0: [first], 2: [late]})
    assert passes[0] == (3 if is_long else 2, length)
    assert {threads for threads, _ in passes[1:]} == {2}, "a token is waited for"


def test_rows_that_a_request_reuses_are_copied_with_the_threads_of_passes():
    target, copying = toy_target(0), list[int]()
    copy_rows = target.copy_rows
    target.copy_rows = lambda *which: (copying.append(torch.get_num_threads()), copy_rows(*which))[1]
    engine = Engine(TargetWorker(target, clock=time.perf_counter), None, policy=Policy("off", CoreSet(threads=3)))
    run_all(engine, {when: [make_request(when, prompt=prompt_of(0, 40))] for when in (0, 40)})
    assert copying == [3]


def test_requests_beyond_the_limit_wait_and_are_taken_first_come_first_served():
    engine = make_engine(toy_target(), None, max_num_seqs=2)
    lengths = {i: 3 + i for i in range(6)}
    for i, length in lengths.items():
        params = GREEDY.replace(max_tokens=length)
        engine.add(engine.check(make_request(i, method="vanilla", uses_drafter=False, params=params)))
    order, most_running = [], 0
    while engine.has_work:
        for update in engine.step():
            if update.finish_reason:
                order.append(update.request_id)
        most_running = max(most_running, engine.stats().num_running)
    assert order == list(lengths)
    assert most_running <= 2


def test_when_the_kv_memory_is_full_requests_wait_and_none_fails():
    target = toy_target()
    engine = make_engine(target, inline(toy_draft(target, 0.9)), max_kv_rows=192)
    requests = [make_request(i, prompt=prompt_of(i, 20), draft=DraftSettings(budget=4)) for i in range(9)]
    for request in requests:
        engine.add(engine.check(request))
    texts: dict[int, list[int]] = {r.request_id: [] for r in requests}
    most_bytes = 0
    while engine.has_work:
        for update in engine.step():
            texts[update.request_id] += update.token_ids
        most_bytes = max(most_bytes, engine.stats().kv_used_bytes)
        assert engine.stats().num_running <= 3
    assert texts == {r.request_id: plain(toy_target(), prompt=r.prompt_ids)[0] for r in requests}
    assert 0 < most_bytes <= 192 * target.row_bytes


def test_a_request_that_can_never_fit_is_refused_at_once_by_name():
    engine = make_engine(toy_target(), None, max_kv_rows=64)
    with pytest.raises(PromptError, match="kv_cache_memory"):
        engine.add(engine.check(make_request(1, method="vanilla", uses_drafter=False, prompt=prompt_of(1, 50))))
    assert not engine.has_work


@pytest.mark.parametrize("num_rounds", [0, 1, 3])
def test_an_aborted_request_frees_its_place_its_rows_and_its_tree_at_once(num_rounds):
    target = toy_target()
    link = inline(toy_draft(target, 0.9))
    engine = make_engine(target, link, max_num_seqs=1)
    engine.add(engine.check(make_request(1)))
    engine.add(engine.check(make_request(2)))
    for _ in range(num_rounds):
        engine.step()
    assert engine.abort(1)
    assert not engine.abort(1), "it is gone"
    assert not link.worker.drafting
    assert engine.stats().kv_open_sequences == 0
    token_ids: list[int] = []
    while engine.has_work:
        for update in engine.step():
            assert update.request_id == 2
            token_ids += update.token_ids
    assert token_ids == plain(toy_target())[0]


def test_a_follow_up_reuses_the_rows_of_the_turn_before_in_target_and_drafter():
    target = toy_target()
    engine = make_engine(target, inline(toy_draft(target, 0.9)))
    prompt = prompt_of(3, 30)
    answer = run_all(engine, {0: [make_request(1, prompt=prompt)]})[1][0]
    follow_up = (*prompt, *answer, 4, 4, 2)
    before = target.num_forward_tokens
    engine.add(engine.check(make_request(2, prompt=follow_up, params=GREEDY.replace(max_tokens=20))))
    updates = engine.step()
    assert updates[0].stats.reused_prompt_tokens >= len(prompt) + len(answer) - 1
    assert target.num_forward_tokens - before <= 5, "only what is new was run"
    token_ids = list(updates[0].token_ids)
    while engine.has_work:
        for update in engine.step():
            token_ids += update.token_ids
    assert token_ids == plain(toy_target(), prompt=follow_up, params=GREEDY.replace(max_tokens=20))[0]
    assert update.stats.drafter_reused_tokens >= len(prompt)
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (2, 1)
    assert stats.prefix_reused_tokens == update.stats.reused_prompt_tokens


def test_a_long_shared_prompt_that_arrives_many_times_at_once_is_read_once():
    target = toy_target()
    engine = make_engine(target, None, prefill_chunk=16)
    shared = prompt_of(2, 48)
    requests = [
        make_request(
            i, method="vanilla", uses_drafter=False, prompt=(*shared, i, i), params=GREEDY.replace(max_tokens=5)
        )
        for i in range(6)
    ]
    texts = run_all(engine, {0: requests})
    assert engine.stats().prefix_hits == 5
    assert texts == {r.request_id: plain(toy_target(), prompt=r.prompt_ids, params=r.params) for r in requests}


class FailingModel(TableModel):
    """Fails on every pass with an extension of so many tokens or more."""

    fails_from = 1
    error: type[Exception] = RuntimeError

    def forward(self, extensions):
        if any(len(extension.token_ids) >= self.fails_from for extension in extensions):
            raise self.error("device fault")
        return super().forward(extensions)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_fault_of_the_target_fails_the_request_that_it_belongs_to_and_no_other(error):
    target = FailingModel(0, vocab_size=12, order=2, spread=1.5, max_model_len=128, num_tree_rows=512)
    target.fails_from, target.error = 60, error
    engine = make_engine(target, inline(toy_draft(toy_target(), 0.9)))
    prompts = {i: prompt_of(i, 60 if i == 3 else 9) for i in range(5)}
    for i, prompt in prompts.items():
        engine.add(engine.check(make_request(i, prompt=prompt)))
    done: dict[int, list[int]] = {i: [] for i in range(5)}
    failures = {}
    while engine.has_work:
        for update in engine.step():
            done[update.request_id] += update.token_ids
            if update.error:
                failures[update.request_id] = (update.finish_reason, type(update.error), str(update.error))
    ((request_id, (reason, kind, text)),) = failures.items()
    assert (request_id, reason, kind) == (3, "error", TargetError)
    assert "device fault" in text
    for i in (0, 1, 2, 4):
        assert done[i] == plain(toy_target(), prompt=prompts[i])[0]
    assert engine.stats().kv_open_sequences == 0


def test_a_pass_that_fails_because_of_its_candidates_is_made_without_them():
    target = FailingModel(0, vocab_size=12, order=2, spread=1.5, max_model_len=128, num_tree_rows=512)
    target.fails_from = 6
    engine = make_engine(target, inline(toy_draft(toy_target(), 0.9)))
    draft = DraftSettings(num_speculative_tokens=6)
    assert run_all(engine, {0: [make_request(1, method="sps", draft=draft)]}) == {1: plain(toy_target())}


def test_a_target_that_fails_at_every_pass_ends_the_engine_cleanly_and_never_hangs():
    target = FailingModel(0, vocab_size=12, max_model_len=128)
    engine = make_engine(target, None)
    failed = 0
    with pytest.raises(WorkerError, match="device fault"):
        for i in range(50):
            engine.add(engine.check(make_request(i, method="vanilla", uses_drafter=False)))
            failed += sum(update.error is not None for update in engine.step())
    assert failed >= 1
    with pytest.raises(WorkerError, match="restart it"):
        engine.step()


def test_a_logits_processor_that_raises_fails_its_own_request_only():
    def broken(prefix_ids, logits):
        raise ValueError("no such rule")

    engine = make_engine(toy_target(), inline(toy_draft(toy_target(), 0.9)))
    request = make_request(1)
    fields = {name: getattr(request, name) for name in request.__slots__} | {"logits_processor": broken}
    engine.add(engine.check(Request(**fields)))
    engine.add(engine.check(make_request(2)))
    token_ids: list[int] = []
    failures = []
    while engine.has_work:
        for update in engine.step():
            failures += [(update.request_id, str(update.error))] if update.error else []
            token_ids += update.token_ids if update.request_id == 2 else ()
    assert [request_id for request_id, _ in failures] == [1]
    assert "no such rule" in failures[0][1]
    assert token_ids == plain(toy_target())[0]


def test_a_request_that_the_device_has_no_memory_for_fails_and_does_not_hang_the_queue():
    class Full(TableModel):
        def open(self, max_rows=None):
            if max_rows > 64:
                raise CapacityError("the device has no memory left")
            return super().open(max_rows)

    engine = make_engine(Full(0, vocab_size=12, order=2, spread=1.5, max_model_len=128), None)
    engine.add(engine.check(make_request(1, method="vanilla", uses_drafter=False, prompt=prompt_of(1, 60))))
    engine.add(engine.check(make_request(2, method="vanilla", uses_drafter=False)))
    updates = engine.step()
    assert (updates[0].request_id, updates[0].finish_reason) == (1, "error")
    assert "no memory" in str(updates[0].error)
    while engine.has_work:
        updates = engine.step()
    assert (updates[0].request_id, updates[0].finish_reason) == (2, "length")


def test_logits_that_are_no_numbers_fail_the_request_instead_of_giving_it_a_token():
    class Sick(TableModel):
        def forward(self, extensions):
            return [np.full_like(logits, np.nan) for logits in super().forward(extensions)]

    engine = make_engine(Sick(0, vocab_size=12, max_model_len=64), None)
    engine.add(engine.check(make_request(1, method="vanilla", uses_drafter=False)))
    (update,) = engine.step()
    assert update.finish_reason == "error"
    assert "NaN" in str(update.error)
    assert engine.stats().kv_open_sequences == 0


def test_a_logits_processor_sees_the_prefix_of_each_position_and_rules_as_in_plain_decoding():
    def no_repeats(prefix_ids, logits):
        assert prefix_ids.shape[0] == 1
        ruled_out = logits.copy()
        ruled_out[:, np.unique(prefix_ids[0, -4:])] = -np.inf
        return ruled_out

    def decode_with(method: str, link: DrafterLink | None) -> list[int]:
        engine = make_engine(toy_target(4), link)
        request = make_request(1, method=method, draft=DraftSettings(verify="tree"), uses_drafter=link is not None)
        request = Request(
            **{name: getattr(request, name) for name in request.__slots__} | {"logits_processor": no_repeats}
        )
        return run_all(engine, {0: [request]})[1][0]

    expected = decode_with("vanilla", None)
    assert all(len(set(expected[i : i + 5])) == 5 for i in range(len(expected) - 4))
    assert decode_with("card", fake(toy_draft(toy_target(4), 0.9))) == expected
    assert decode_with("sps", inline(toy_draft(toy_target(4), 0.9))) == expected


@pytest.mark.parametrize("offset", range(-20, 3))
def test_prompts_around_the_context_limit_succeed_or_are_refused_by_name(offset):
    max_model_len = 64
    target = toy_target(max_model_len=max_model_len, num_tree_rows=16)
    engine = make_engine(target, fake(toy_draft(target, 0.9)))
    prompt = prompt_of(1, max_model_len + offset)
    request = make_request(1, prompt=prompt, draft=DraftSettings(verify="tree", budget=16))
    if offset >= 0:
        with pytest.raises(PromptError, match="context"):
            engine.add(engine.check(request))
        return
    token_ids, reason = run_all(engine, {0: [request]})[1]
    alone = plain(toy_target(max_model_len=max_model_len), prompt=prompt)
    assert (token_ids, reason) == alone
    assert len(token_ids) == min(-offset, GREEDY.max_tokens)
