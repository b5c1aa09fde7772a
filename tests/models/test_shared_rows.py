"""Rows of texts that begin alike are held once: chats whose thoughts leave the history, questions behind one prompt."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest

from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.models.protocol import Extension
from card.models.rows.pool import BLOCK_ROWS, SequencePool
from card.models.runner import ExactRunner
from card.models.runners import plain_runner
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
