"""A request with a long way to go gives its room to a shorter one: its KV rows wait in a file, and its text stays."""

from __future__ import annotations

import errno
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from card import LLM
from card.config import DraftSettings, SamplingParams
from card.config.selection import SelfDrafting, parse_selection
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.errors import CapacityError, SettingsError
from card.models.protocol import Extension
from card.models.rows.row_store import RowStore
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.decoding import inline, make_request, run_all, toy_target
from tests.pair import Pair
from tests.reaching_in import pool_of
from tests.tiny import tiny_llama

METHODS = ("vanilla", "self-drafting", "card")
NUM_LONG, NUM_SHORT, NUM_PROMPT = 60, 8, 12
CHAIN = DraftSettings(verify="chain", num_speculative_tokens=6, budget=6, min_verify_prob=0.0)  # of the target's own


def runner_of(noise: float = 0.0) -> RowRunner:
    return plain_runner(tiny_llama(61, noise=noise, max_position_embeddings=256), max_model_len=128)


def engine_of(method: str, store: RowStore | None, *, num_rows: int = 120) -> Engine:
    """Return an engine whose memory holds so many rows: one long request, or some short ones."""
    runner = runner_of()
    drafting = SelfDrafting(parse_selection("sparse:0.1:12")) if method == "self-drafting" else None
    memory = {"max_kv_bytes": num_rows * runner.row_bytes, "row_store": store}
    worker = TargetWorker(runner, clock=time.perf_counter, self_drafting=drafting, **memory)
    return Engine(worker, inline(runner_of(0.1)) if method == "card" else None, limits=Limits(prefill_chunk=8))


def requests(method: str) -> dict[int, list[Request]]:
    """Return a long request, then in its middle two short ones, and later another long one."""
    found: dict[int, list[Request]] = {}
    for idx, (at, length) in enumerate([(0, NUM_LONG), (12, NUM_SHORT), (12, NUM_SHORT), (16, NUM_LONG)]):
        prompt = tuple((7 * j * j + idx) % 61 for j in range(NUM_PROMPT))
        params = SamplingParams(temperature=float(idx % 2), seed=idx, max_tokens=length)
        shape = {"method": "card", "draft": CHAIN} if method == "self-drafting" else {"method": method}
        one = make_request(idx, params=params, prompt=prompt, uses_drafter=method == "card", **shape)
        found.setdefault(at, []).append(one)
    return found


def run(engine: Engine, method: str) -> tuple[dict[int, tuple[list[int], str]], list[int], int]:
    """Return the texts, the requests in the order in which they ended, and the most bytes that lay in files."""
    ended: list[int] = []
    most_bytes = 0
    step = engine.step

    def watched() -> Any:
        nonlocal most_bytes
        updates = step()
        ended.extend(update.request_id for update in updates if update.finish_reason is not None)
        most_bytes = max(most_bytes, engine.stats().kv_offloaded_bytes)
        return updates

    engine.step = watched  # type: ignore[method-assign]
    return run_all(engine, requests(method)), ended, most_bytes


@cache
def wanted(method: str) -> dict[int, tuple[list[int], str]]:
    return run(engine_of(method, None, num_rows=4096), method)[0]


def with_a_paused_request(store: RowStore) -> Engine:
    """Return an engine in which a short request has just taken the place of the first long one."""
    engine = engine_of("vanilla", store)
    (first,), (second, _) = requests("vanilla")[0], requests("vanilla")[12]
    engine.add(engine.check(first))
    for _ in range(6):
        engine.step()
    engine.add(engine.check(second))
    while not store.used_bytes:
        engine.step()
    return engine


@pytest.mark.parametrize("method", METHODS)
def test_a_short_request_overtakes_a_long_one_and_no_text_changes(method: str, tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), 1 << 30)
    texts, ended, most_bytes = run(engine_of(method, store), method)
    assert texts == wanted(method)
    assert ended == [1, 2, 0, 3], "short ones first; the paused one before what came after it was paused"
    assert most_bytes > 0
    assert store.used_bytes == 0
    assert list(tmp_path.iterdir()) == [], "files have no names, so that none outlives the process"


def test_without_a_folder_requests_wait_in_line() -> None:
    texts, ended, most_bytes = run(engine_of("vanilla", None), "vanilla")
    assert texts == wanted("vanilla")
    assert (ended, most_bytes) == ([0, 1, 2, 3], 0)


def test_a_full_disk_lets_requests_wait_in_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = RowStore(str(tmp_path), 1 << 30)

    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    texts, ended, most_bytes = run(engine_of("self-drafting", store), "self-drafting")
    assert texts == wanted("self-drafting")
    assert (ended, most_bytes) == ([0, 1, 2, 3], 0)
    told = [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()]
    assert len(told) == 1, "one line, not one a round"  # the last request is as long as the first


def test_a_store_that_is_full_by_its_own_bound_does_the_same(tmp_path: Path) -> None:
    texts, ended, _ = run(engine_of("vanilla", RowStore(str(tmp_path), 100)), "vanilla")
    assert texts == wanted("vanilla")
    assert ended == [0, 1, 2, 3]


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_cannot_be_read_back_are_computed_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = RowStore(str(tmp_path), 1 << 30)

    def cut_off(stored: Any) -> Any:
        stored.file.truncate(10)
        return RowStore.read(store, stored)

    monkeypatch.setattr(store, "read", cut_off)
    texts, ended, _ = run(engine_of(method, store), method)
    assert texts == wanted(method)
    assert ended == [1, 2, 0, 3]
    assert "read again" in caplog.text
    assert store.used_bytes == 0


def test_an_aborted_request_frees_its_file(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), 1 << 30)
    engine = with_a_paused_request(store)
    update = engine.abort(0)
    assert update is not None and update.finish_reason == "abort"
    assert store.used_bytes == 0
    engine.add(engine.check(requests("vanilla")[12][1]))
    while engine.has_work:
        engine.step()
    assert engine.stats().num_finished == 2


def test_a_paused_request_waits_for_room_that_a_scored_text_has(tmp_path: Path) -> None:
    engine = with_a_paused_request(RowStore(str(tmp_path), 1 << 30))
    engine.abort(1)
    pool = pool_of(engine)
    slot = pool.open((), 60).slot
    assert [engine.step() for _ in range(3)] == [[], [], []]
    pool.close(slot)
    while engine.has_work:
        engine.step()
    assert (engine.stats().num_finished, engine.stats().num_failed) == (1, 0)


def test_rows_come_back_bit_for_bit(tmp_path: Path) -> None:
    runner, other = runner_of(), runner_of()
    slot = runner.open(40)
    runner.forward([Extension(slot, list(range(30)), range(-1, 29))])
    store = RowStore(str(tmp_path), 1 << 30)
    stored = store.put(runner.read_rows(slot))
    assert store.used_bytes == 30 * runner.row_bytes
    again = other.open(64)
    other.write_rows(again, store.read(stored))
    assert (other.read_rows(again) == runner.read_rows(slot)).all()
    with pytest.raises(CapacityError):
        other.write_rows(other.open(8), store.read(stored))


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path, pair: Pair) -> None:
    with pytest.raises(SettingsError, match="kv_offload must name a folder"):
        RowStore(str(tmp_path / "missing"), 1)
    with pytest.raises(SettingsError, match="kv_offload must name a folder"):
        LLM(pair.target, kv_offload=str(tmp_path / "missing"))


def test_a_target_whose_rows_cannot_be_moved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="leave kv_offload out"):
        TargetWorker(toy_target(), clock=time.perf_counter, row_store=RowStore(str(tmp_path), 1))


def test_the_python_api_takes_a_folder(tmp_path: Path, pair: Pair) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = ["the cat sat", "one two three"]
    settings = {"dtype": "float32", "method": "vanilla"}
    with LLM(pair.target, **settings) as plain, LLM(pair.target, **settings, kv_offload=str(tmp_path)) as llm:
        texts = [[one.outputs[0].token_ids for one in some.generate(prompts, params)] for some in (plain, llm)]
    assert texts[0] == texts[1]
