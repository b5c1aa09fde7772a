"""Rows of texts that begin alike are held once: chats whose thoughts leave the history, questions behind one prompt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest

from card.drafting.beam import BeamWriter
from card.drafting.drafter import DrafterWorker
from card.drafting.messages import Close, Correction, Open, Resync
from card.errors import CapacityError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.models.protocol import Extension
from card.models.rows.pool import BLOCK_ROWS, SequencePool
from card.models.runner import ExactRunner
from card.models.runners import plain_runner
from tests.drafts import draft_spec
from tests.models import test_records, test_states
from tests.reaching_in import cache_of, space_landmarks
from tests.tiny import tiny_llama

pytestmark = pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here")
V, MAX_MODEL_LEN = 64, 1200
WORDS = [(7 * i * i + 3 * i + i // 5) % V for i in range(5000)]


@functools.cache
def runner_of() -> ExactRunner:
    model = tiny_llama(V, seed=3, max_position_embeddings=2 * MAX_MODEL_LEN)
    runner = plain_runner(model, max_model_len=MAX_MODEL_LEN, max_tree_rows=200)
    assert isinstance(runner, ExactRunner)
    return runner


def read(runner: ExactRunner, slot: int, text: Sequence[int]) -> Floats:
    """Read what a sequence lacks of a text; return the logits of the last token."""
    start = runner.num_rows(slot)
    return np.array(runner.forward([Extension.of_text(slot, text, start, first_logits=len(text) - 1)])[0])


def logits_of(text: Sequence[int]) -> Floats:
    """Return the last logits of a text that shares nothing."""
    runner = runner_of()
    slot = runner.open()
    logits = read(runner, slot, text)
    runner.close(slot)
    return logits


def rows_held(pool: SequencePool) -> int:
    return pool.stats.used_bytes // runner_of().row_bytes


def pool_of(num_rows: int) -> SequencePool:
    return SequencePool(runner_of(), num_rows * runner_of().row_bytes)


def test_twenty_turns_of_a_thinking_chat_hold_the_history_once() -> None:
    """Thoughts leave the history, so that no turn's text begins with all of the one before."""
    runner, pool, history, alone = runner_of(), pool_of(30000), list[int](), 0
    for turn in range(20):
        asked, thought, answer = (
            WORDS[turn * 90 + first : turn * 90 + end] for first, end in ((0, 20), (20, 60), (60, 90))
        )
        prompt = [*history, *asked]
        opened = pool.open(prompt, len(prompt) + 200)
        assert opened.num_reused >= len(history) - len(answer), "all but the last answer, which followed a thought"
        assert np.array_equal(read(runner, opened.slot, prompt), logits_of(prompt))
        text = [*prompt, *thought, *answer]
        read(runner, opened.slot, text)
        pool.close(opened.slot, text)
        alone += -(-len(text) // BLOCK_ROWS) * BLOCK_ROWS
        history = [*prompt, *answer]
    assert pool.stats.num_retained == 20
    assert alone == 11584
    assert rows_held(pool) == 2944
    pool.clear()


def test_five_questions_behind_the_same_tools_hold_these_once() -> None:
    runner, pool, tools = runner_of(), pool_of(30000), WORDS[:1000]
    first = pool.open(tools, len(tools) + BLOCK_ROWS)
    read(runner, first.slot, tools)
    pool.close(first.slot, tools)
    running = []
    for question in range(5):
        prompt = [*tools, *WORDS[2000 + 50 * question : 2040 + 50 * question]]
        opened = pool.open(prompt, len(prompt) + 60)
        assert opened.num_reused == len(tools)
        running.append((opened.slot, prompt))
    logits = runner.forward([Extension.of_text(slot, prompt, len(tools)) for slot, prompt in running])
    for (_, prompt), one in zip(running, logits, strict=True):
        assert np.array_equal(one, logits_of(prompt))
    assert rows_held(pool) == 1664, "of 6,656 rows that they and the first have room for"
    for slot, prompt in running:
        pool.close(slot, prompt)
    assert rows_held(pool) == 1312, "of 5,600"
    pool.clear()


def test_an_aborted_neighbour_a_branch_and_an_undone_edit_leave_a_text_as_it_is() -> None:
    runner, pool, base = runner_of(), pool_of(1600), WORDS[:300]
    held = pool.open(base, 400).slot
    read(runner, held, base)
    pool.note(held, base)
    neighbour, branch = pool.open([*base, 1], 400).slot, pool.open([*base[:200], 1, 2], 400).slot
    read(runner, neighbour, [*base, *WORDS[700:720]])
    assert np.array_equal(
        read(runner, branch, [*base[:200], *WORDS[800:850]]), logits_of([*base[:200], *WORDS[800:850]])
    )
    pool.close(neighbour)  # aborted
    assert np.array_equal(read(runner, held, [*base, 5, 6]), logits_of([*base, 5, 6]))
    pool.close(held, [*base, 5, 6])
    edited = pool.open([*base[:150], 9, *base[151:]], 400)
    assert edited.num_reused == 150
    read(runner, edited.slot, [*base[:150], 9, *base[151:]])
    pool.close(edited.slot, [*base[:150], 9, *base[151:]])
    undone = pool.open([*base, 5, 6, 7], 400)
    assert undone.num_reused == len(base) + 2
    assert np.array_equal(read(runner, undone.slot, [*base, 5, 6, 7]), logits_of([*base, 5, 6, 7]))
    for slot in (undone.slot, branch):
        pool.close(slot)
    pool.clear()


def test_a_lender_that_does_not_fit_beside_its_heir_leaves_it_the_rows() -> None:
    runner, pool, base = runner_of(), pool_of(640), WORDS[:500]
    first = pool.open(base, 512).slot
    read(runner, first, base)
    pool.close(first, base)
    text = [*base[:450], *WORDS[900:950]]
    opened = pool.open(text, 640)
    assert opened.num_reused == 450 and pool.stats.num_retained == 0
    assert pool.stats.used_bytes == 640 * runner.row_bytes
    assert np.array_equal(read(runner, opened.slot, text), logits_of(text))
    pool.close(opened.slot)
    assert pool.stats.used_bytes == 0


def test_a_request_needs_room_for_what_it_does_not_share_with_running_ones() -> None:
    runner, pool, tools = runner_of(), pool_of(704), WORDS[:512]
    first = pool.open(tools, 544).slot
    read(runner, first, tools)
    pool.note(first, tools)
    text = [*tools, *WORDS[1000:1040]]
    assert not pool.has_room(576) and not pool.has_room(576, WORDS[1:541])
    assert pool.has_room(576, text) and pool.has_room(576, without=first)
    opened = pool.open(text, 576)
    assert opened.num_reused == 512 and rows_held(pool) == 608
    assert np.array_equal(read(runner, opened.slot, text), logits_of(text))
    pool.note(opened.slot, text)
    slot = pool.grow(opened.slot, 672)
    assert rows_held(pool) == 704, "of its new place it shares as much"
    with pytest.raises(CapacityError):
        pool.grow(slot, 704)
    assert np.array_equal(read(runner, slot, [*text, 5]), logits_of([*text, 5]))
    for one in (first, slot):
        pool.close(one)
    pool.clear()


def test_a_drafter_that_had_no_room_asks_again_once_there_is_some_for_what_nobody_lends() -> None:
    runner, tools = runner_of(), WORDS[:512]
    worker = DrafterWorker(BeamWriter(runner, kv_cache_bytes=1296 * runner.row_bytes), clock=lambda: 0.0)
    worker.receive(Open(1, tuple(tools), draft_spec(max_len=544)))
    while worker.drafting[1].sequence.num_committed_rows < len(tools):
        worker.step()
    worker.receive(Open(2, tuple(WORDS[600:700]), draft_spec(max_len=120)))
    text = (*tools, *WORDS[1000:1010])
    assert worker.receive(Open(3, text, draft_spec(max_len=544))) == [] and set(worker.drafting) == {1, 2}
    asks = Correction(request_id=3, round_idx=0, start=len(text), token_ids=(5,), wants_snapshot=False)
    assert worker.receive(asks) == []
    worker.receive(Close(2))
    assert not worker.writer.has_room(draft_spec(max_len=544)), "there is none for all of its rows"
    assert worker.receive(asks) == [Resync(3, None)]
    worker.receive(Open(3, text, draft_spec(max_len=544)))
    assert worker.drafting[3].sequence.num_reused == len(tools)
    for request_id in (1, 3):
        worker.receive(Close(request_id))
    worker.writer.pool.clear()


def test_a_longer_lender_gives_way_to_a_running_one_that_leaves_room() -> None:
    """What memory holds of a finished text is longer, but takes memory that the running one's rows do not."""
    runner, pool, tools = runner_of(), pool_of(640), WORDS[:400]
    text = [*tools, *WORDS[1000:1060]]
    first = pool.open(tools, 416).slot
    read(runner, first, tools)
    pool.note(first, tools)
    other = pool.open(text, 480).slot
    read(runner, other, text)
    pool.close(other, text)
    opened = pool.open([*text, 1], 608)
    assert opened.num_reused in (400, 460) and pool.stats.num_open == 2
    assert pool.stats.used_bytes <= 640 * runner.row_bytes
    assert np.array_equal(read(runner, opened.slot, [*text, 1]), logits_of([*text, 1]))
    for one in (first, opened.slot):
        pool.close(one)
    pool.clear()


@pytest.mark.parametrize("kind", [test_states, test_records], ids=["states", "convolutions"])
def test_hybrids_share_rows_and_landmarks_until_one_writes_there(
    monkeypatch: pytest.MonkeyPatch, kind: ModuleType
) -> None:
    space_landmarks(monkeypatch, 32)
    runner, text = kind.make_runner(), kind.TEXT[:130]
    cache, source = cache_of(runner), runner.open(160)
    runner.forward([Extension.of_text(source, text, first_logits=len(text) - 1)])
    runner.keep(source, 130)
    alone = runner.held_bytes([source])
    reached = runner.lendable_rows(source, 129)
    heirs = [runner.open(160) for _ in range(3)]
    for heir in heirs:
        runner.copy_rows(source, heir, reached)
    held = [set(records.held) for slot in (source, *heirs) if (records := cache[slot].records) is not None]
    assert len(held) == 4 and len(set.intersection(*held)) >= 4, "the landmarks of four blocks"
    shared = runner.shared_bytes(reached)
    assert shared > 3 * runner.row_bytes * 16
    assert 4 * alone - runner.held_bytes([source, *heirs]) >= 3 * shared
    cut = heirs[0]
    runner.keep(cut, 40)
    other = [*text[:40], *text[60:110]]
    runner.forward([Extension.of_text(cut, other, 40)])
    assert kind.goes_on(runner, cut, other)
    runner.copy_rows(source, last := runner.open(160), 64)
    assert kind.goes_on(runner, last, text[:64])
    assert kind.goes_on(runner, heirs[1], text[:reached])
    runner.close(source)
    assert kind.goes_on(runner, heirs[2], text[:reached])
    for slot in (*heirs, last):
        runner.close(slot)
    assert cache.num_bytes == cache.free_bytes
