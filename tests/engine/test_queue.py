"""With a store for rows more requests run than fit at their longest; no text changes, and none is lost or stuck."""

from __future__ import annotations

import errno
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.config.selection import SelfDrafting, parse_selection
from card.engine.engine import Engine, Limits
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.models.rows.row_store import RowStore
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.decoding import inline, make_request, plain, run_all, toy_draft, toy_target
from tests.examples import settings
from tests.reaching_in import pool_of, queue_of
from tests.tiny import tiny_llama
from tests.toy import MovableTable, TableModel

METHODS = ("vanilla", "self-drafting", "card")
ROUNDS_OF_A_TEXT = 1000  # far more than any schedule here takes
DRAFT = DraftSettings(num_speculative_tokens=4, budget=6)
CHAIN = DRAFT.replace(verify="chain", budget=4, min_verify_prob=0.0)  # all that a target drafts for itself


def movable(seed: int = 0) -> TableModel:
    target = toy_target(seed)
    target.__class__ = MovableTable
    return target


def engine_of(
    method: str, target: Any, draft: Any, store: RowStore | None, *, num_rows: int, num_at_once: int = 8
) -> Engine:
    drafting = SelfDrafting(parse_selection("sparse:0.1:8")) if method == "self-drafting" else None
    memory = {"max_kv_bytes": num_rows * target.row_bytes, "row_store": store}
    worker = TargetWorker(target, clock=time.perf_counter, self_drafting=drafting, **memory)
    limits = Limits(prefill_chunk=8, max_num_seqs=num_at_once)
    return Engine(worker, inline(draft) if method == "card" else None, limits=limits)


def one_request(idx: int, method: str, length: int, *, num_prompt: int = 12, vocab_size: int = 12) -> Request:
    prompt = tuple((7 * j * j + idx) % vocab_size for j in range(num_prompt))
    params = SamplingParams(temperature=float(idx % 2), seed=idx, max_tokens=length)
    shape = {"method": "card", "draft": CHAIN} if method == "self-drafting" else {"method": method, "draft": DRAFT}
    return make_request(idx, params=params, prompt=prompt, uses_drafter=method == "card", **shape)


def watched(engine: Engine, arrivals: dict[int, list[Request]]) -> tuple[dict[int, tuple[list[int], str]], int]:
    """Return the texts, and the most requests that ran at once."""
    most, step = 0, engine.step

    def counted() -> Any:
        nonlocal most
        updates = step()
        most = max(most, engine.stats().num_running)
        assert engine.stats().rounds < ROUNDS_OF_A_TEXT
        return updates

    engine.step = counted  # type: ignore[method-assign]
    return run_all(engine, arrivals), most


def crowd(method: str, vocab_size: int) -> dict[int, list[Request]]:
    """Return a short request, from which lengths are expected, and seven long ones once it is over."""
    long = [one_request(idx, method, 40 + idx, vocab_size=vocab_size) for idx in range(1, 8)]
    return {0: [one_request(0, method, 6, vocab_size=vocab_size)], 10: long}


@pytest.mark.parametrize("method", METHODS)
def test_more_run_at_once_than_fit_at_their_longest_and_no_text_changes(method: str, tmp_path: Path) -> None:
    def runner_of(noise: float = 0.0) -> RowRunner:
        return plain_runner(tiny_llama(61, noise=noise, max_position_embeddings=256), max_model_len=128)

    store = RowStore(str(tmp_path), 1 << 30)
    wide = engine_of(method, runner_of(), runner_of(0.1), None, num_rows=4096)
    wanted = run_all(wide, crowd(method, 61))
    worst = engine_of(method, runner_of(), runner_of(0.1), None, num_rows=260)
    texts, most_at_worst = watched(worst, crowd(method, 61))
    assert texts == wanted and most_at_worst <= 4
    engine = engine_of(method, runner_of(), runner_of(0.1), store, num_rows=260)
    texts, most = watched(engine, crowd(method, 61))
    assert texts == wanted
    assert most == 7
    assert engine.stats().num_pauses > 0 and engine.stats().kv_moved_bytes > 0
    assert store.used_bytes == 0 and engine.stats().kv_open_sequences == 0


def crowded(method: str, store: RowStore) -> Engine:
    """Return an engine in which somebody has just been paused for one who was there before."""
    engine = engine_of(method, movable(), toy_draft(toy_target(), 0.8), store, num_rows=260)
    for requests in crowd(method, 12).values():
        for request in requests:
            engine.add(engine.check(request))
        while engine.has_work and not engine.stats().num_finished:
            engine.step()
    while not engine.stats().num_pauses:
        engine.step()
    return engine


@pytest.mark.parametrize("method", METHODS)
def test_the_oldest_is_never_held_up_and_who_came_last_gives_way(method: str, tmp_path: Path) -> None:
    engine = crowded(method, RowStore(str(tmp_path), 1 << 30))
    paused = set(queue_of(engine).paused)
    assert max(queue_of(engine).running) < min(paused), "who came last gives way"
    left = set(range(1, 8))
    while engine.has_work:
        assert min(left) in queue_of(engine).running, "the oldest has what it wants"
        paused |= set(queue_of(engine).paused)
        left -= {update.request_id for update in engine.step() if update.finish_reason is not None}
    assert 1 not in paused


def test_who_was_pushed_out_comes_back_before_anybody_new(tmp_path: Path) -> None:
    engine = crowded("vanilla", RowStore(str(tmp_path), 1 << 30))
    engine.add(engine.check(one_request(99, "vanilla", 80)))
    while 99 not in queue_of(engine).running:
        engine.step()
    assert not queue_of(engine).paused
    while engine.has_work:
        engine.step()
    assert engine.stats().num_finished == 9


@pytest.mark.parametrize("method", METHODS)
def test_on_a_full_disk_rows_are_dropped_and_computed_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = RowStore(str(tmp_path), 1 << 30)

    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    wanted = run_all(engine_of(method, movable(), toy_target(), None, num_rows=1 << 20), crowd(method, 12))
    engine = engine_of(method, movable(), toy_draft(toy_target(), 0.8), store, num_rows=260)
    texts, _ = watched(engine, crowd(method, 12))
    assert texts == wanted
    assert engine.stats().num_pauses > 0 and engine.stats().kv_moved_bytes == 0
    assert "must be read again later" in caplog.text


def test_an_aborted_request_that_was_pushed_out_frees_its_file(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), 1 << 30)
    engine = crowded("self-drafting", store)
    while (paused := list(queue_of(engine).paused)) and engine.abort(paused[0]):
        pass
    assert store.used_bytes == 0
    while engine.has_work:
        engine.step()
    assert engine.stats().num_failed == 0 and engine.stats().kv_open_sequences == 0


def test_a_request_that_outgrows_its_room_waits_for_a_text_that_is_scored(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), 1 << 30)
    engine = engine_of("vanilla", movable(), None, store, num_rows=128)
    run_all(engine, {0: [one_request(0, "vanilla", 2)]})
    request = one_request(1, "vanilla", 80)
    engine.add(engine.check(request))
    engine.step()
    pool = pool_of(engine)
    slot = pool.open((), 96).slot
    token_ids: list[int] = []
    for _ in range(40):
        token_ids += [token for update in engine.step() for token in update.token_ids]
    assert set(queue_of(engine).paused) == {1}, "it gives its own rows away rather than fail"
    pool.close(slot)
    while engine.has_work:
        token_ids += [token for update in engine.step() for token in update.token_ids]
    wanted, _ = plain(toy_target(), params=request.params, prompt=request.prompt_ids)
    assert token_ids == wanted[-len(token_ids) :] and engine.stats().num_failed == 0


lengths = st.lists(st.integers(1, 70), min_size=2, max_size=9)


@settings(max_examples=25, deadline=None)
@given(
    lengths=lengths,
    num_rows=st.integers(96, 400),
    store_rows=st.integers(0, 300),
    aborts=st.dictionaries(st.integers(0, 8), st.integers(1, 60), max_size=3),
    method=st.sampled_from(METHODS),
)
def test_whatever_comes_and_leaves_each_text_is_that_of_plain_decoding(
    lengths: list[int], num_rows: int, store_rows: int, aborts: dict[int, int], method: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = RowStore(folder, 8 * store_rows)
        engine = engine_of(method, movable(), toy_draft(toy_target(), 0.7), store, num_rows=num_rows, num_at_once=4)
        requests = [one_request(idx, method, length, num_prompt=5 + idx) for idx, length in enumerate(lengths)]
        texts: dict[int, list[int]] = {idx: [] for idx in range(len(requests))}
        reasons: dict[int, str] = {}
        for round_idx in range(ROUNDS_OF_A_TEXT * len(requests)):
            num_arrived = round_idx // 5
            if round_idx % 5 == 0 and num_arrived < len(requests):
                engine.add(engine.check(requests[num_arrived]))
            elif num_arrived >= len(requests) and not engine.has_work:
                break
            told = [engine.abort(idx) for idx, when in aborts.items() if when == round_idx]
            for update in [*engine.step(), *(one for one in told if one is not None)]:
                texts[update.request_id] += update.token_ids
                if update.finish_reason is not None:
                    reasons[update.request_id] = update.finish_reason
        assert not engine.has_work and set(reasons) == set(texts), "nobody is lost, and nobody waits for ever"
        for request in requests:
            wanted, reason = plain(toy_target(), params=request.params, prompt=request.prompt_ids)
            token_ids, why = texts[request.request_id], reasons[request.request_id]
            assert (token_ids, why) == (wanted, reason) or (why == "abort" and token_ids == wanted[: len(token_ids)])
        assert store.used_bytes == 0 and engine.stats().kv_open_sequences == 0 and engine.stats().num_failed == 0


def test_requests_without_a_bound_run_at_once_though_their_longest_texts_do_not_fit() -> None:
    def engine(num_rows: int, *, may_grow: bool) -> Engine:
        memory = {"max_kv_bytes": num_rows * movable().row_bytes, "may_grow": may_grow}
        worker = TargetWorker(toy_target(max_model_len=300), clock=time.perf_counter, **memory)
        return Engine(worker, None, limits=Limits(prefill_chunk=64, max_num_seqs=4))

    def requests() -> dict[int, list[Request]]:
        params = SamplingParams(temperature=0.0, seed=0)
        prompts = [tuple((7 * j * j + idx) % 12 for j in range(12)) for idx in range(3)]
        asked = [
            make_request(idx, method="vanilla", params=params, prompt=prompt, uses_drafter=False)
            for idx, prompt in enumerate(prompts)
        ]
        assert not any(one.is_bounded for one in asked)
        return {0: asked}

    wanted = run_all(engine(1 << 20, may_grow=False), requests())
    assert {reason for _, reason in wanted.values()} == {"length"}
    in_line, most_in_line = watched(engine(880, may_grow=False), requests())
    short = engine(880, may_grow=True)
    texts, most = watched(short, requests())
    assert texts == in_line == wanted
    assert (most_in_line, most) == (2, 3)
    assert short.stats().num_pauses > 0 and short.stats().kv_offloaded_bytes == 0


def test_a_request_with_a_bound_has_room_for_it_though_memory_is_short() -> None:
    memory = {"max_kv_bytes": 200 * movable().row_bytes, "may_grow": True}
    worker = TargetWorker(toy_target(), clock=time.perf_counter, **memory)
    engine = Engine(worker, None, limits=Limits(max_num_seqs=4))
    texts, most = watched(engine, {0: [one_request(idx, "vanilla", 100) for idx in range(3)]})
    assert all(len(ids) == 100 for ids, _ in texts.values())
    assert (most, engine.stats().num_pauses) == (1, 0)
