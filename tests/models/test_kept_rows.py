"""What a cache keeps of a text: whatever was read, drafted, dropped or copied before, a row's logits are its text's.

All that is measured or chosen is drawn: rows of a pass, room for candidates, how far landmarks are apart, how many rows
of a chain wait, threads. Memory is full of NaN before it is used, so that what is read too early is never right by
chance.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.machine.threads import integer_passes_on
from card.models.own import state_steps
from card.models.protocol import Extension
from card.models.rows.pool import SequencePool
from card.models.runner import ExactRunner
from card.models.runners import plain_runner
from tests.every_family import script
from tests.examples import settings
from tests.reaching_in import (
    fill_buffers,
    interrupt_passes,
    space_landmarks,
    spoil_free_memory,
    spoil_new_memory,
)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here"),
]
MAX_MODEL_LEN, VOCAB = 160, 97
ROOMS, APART, WAITING = (3, 12, 16, 40), (32, 64), (1, 8, 32)
# The delta rule, alone and beside experts; short convolutions; windows; sinks; layers that share rows.
FAMILIES = ("qwen3_5_text", "qwen3_next", "lfm2", "gemma3_text", "gpt_oss", "gemma4_text")
WITH_RECORDS = ("qwen3_5_text", "qwen3_next", "lfm2")
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(MAX_MODEL_LEN)]


@pytest.fixture(autouse=True, scope="module")
def _spoilt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        spoil_new_memory(patch)
        yield


@functools.cache
def config_of(family: str) -> Any:
    config = script().tiny_config(family)
    config.max_position_embeddings = 2 * MAX_MODEL_LEN
    config._attn_implementation = "eager"
    return config


@functools.cache
def runner_of(family: str, room: int = 2 * MAX_MODEL_LEN, apart: int = 32) -> ExactRunner:
    """Return a runner with landmarks so far apart; the models of a family are all the same."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family)).eval()
    with pytest.MonkeyPatch.context() as patch:
        space_landmarks(patch, apart)
        runner = plain_runner(model, max_model_len=MAX_MODEL_LEN, max_tree_rows=room)
    assert isinstance(runner, ExactRunner)
    return runner


def opened(runner: ExactRunner, max_rows: int | None = None) -> int:
    """Return a new sequence in memory that is full of NaN, as floats, and of tokens that do not exist."""
    spoil_free_memory(runner)
    fill_buffers(runner)
    return runner.open(max_rows)


@functools.cache
def logits_of(family: str, token_ids: tuple[int, ...]) -> Floats:
    """Return the logits of a text that is read at once, by a runner that has room for all of it."""
    runner = runner_of(family)
    slot = runner.open()
    (logits,) = runner.forward([Extension.of_text(slot, token_ids, first_logits=0)])
    runner.close(slot)
    return np.array(logits)


@contextmanager
def waiting_rows(count: int) -> Iterator[None]:
    """Let so many rows of a chain that nobody has called text wait before they are absorbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_steps, "MOST_UNSURE", count)
        yield


@dataclass
class Held:
    """A sequence of a runner: its text, and candidates behind it."""

    family: str
    runner: ExactRunner
    slot: int
    text: list[int]
    tokens: list[int] = field(default_factory=list)  # of candidates
    parents: list[int] = field(default_factory=list)  # among them; -1: the text's last token

    def path(self, node: int) -> list[int]:
        """Return the candidates from the text to one of them."""
        path = list[int]()
        while node >= 0:
            path, node = [node, *path], self.parents[node]
        return path

    def judge(self, node: int, logits: Floats) -> None:
        """Check the logits of a candidate."""
        told = tuple([*self.text, *(self.tokens[one] for one in self.path(node))])
        assert np.array_equal(logits, logits_of(self.family, told)[-1]), (len(self.text), node)

    def reading(self, size: int, first_logits: int | None) -> Extension:
        """Return the pass that goes on with the text; the logits of its rows are asked for from one on."""
        held, self.text = len(self.text), [*self.text, *TEXT[len(self.text) : len(self.text) + size]]
        first = held if first_logits is None else max(held, len(self.text) - 1 - first_logits)
        return Extension.of_text(self.slot, self.text, held, first_logits=first)

    def judge_text(self, logits: Floats) -> None:
        """Check the logits of the last rows of the text."""
        expected = logits_of(self.family, tuple(self.text))[len(self.text) - len(logits) :]
        assert np.array_equal(logits, expected), len(self.text)

    def drafting(self, tokens: Sequence[int], parents: Sequence[int]) -> Extension:
        """Return the pass of more candidates."""
        self.tokens, self.parents = [*self.tokens, *tokens], [*self.parents, *parents]
        return Extension(self.slot, tokens, [len(self.text) + parent for parent in parents])

    def keep(self, node: int) -> None:
        """Keep the text and the candidates down to one of them."""
        path = self.path(node)
        self.runner.keep(self.slot, len(self.text), [len(self.text) + one for one in path])
        self.text = [*self.text, *(self.tokens[one] for one in path)]
        self.tokens, self.parents = [], []

    def cut(self, length: int) -> None:
        self.runner.keep(self.slot, length)
        self.text, self.tokens, self.parents = self.text[:length], [], []


class Uses:
    """Uses of two sequences that hypothesis draws."""

    def __init__(self, data: st.DataObject, family: str, runner: ExactRunner, room: int) -> None:
        self._data, self._family, self._runner, self._room = data, family, runner, room
        self._held = [self._begun(), self._begun()]

    def _begun(self) -> Held:
        """Return a sequence that holds a token."""
        held = Held(self._family, self._runner, opened(self._runner), [])
        (logits,) = self._runner.forward([held.reading(1, 0)])
        held.judge_text(logits)
        return held

    def draw(self, least: int, most: int) -> int:
        return self._data.draw(st.integers(least, most))

    def take_one(self) -> None:
        """Let one thing happen to one of them, or to both in one pass."""
        kind = self._data.draw(st.sampled_from(["read", "draft", "draft", "cut", "lend", "branch", "move", "fail"]))
        idx = self.draw(0, 1)
        held = self._held[idx]
        if kind == "read":
            self._read(idx)
        elif kind == "draft":
            self._draft(held)
        elif kind == "cut":
            held.cut(self.draw(1, len(held.text)))
        elif kind == "fail":
            self._fail(held)
        elif kind == "branch":
            self._runner.close(self._held[1 - idx].slot)
            self._held[1 - idx] = self._branch(held)
        elif kind == "lend":
            self._held[idx] = self._branch(held)
            self._runner.close(held.slot)
        else:
            self._held[idx] = self._moved(held)

    def end(self) -> None:
        for held in self._held:
            self._runner.close(held.slot)

    def _read(self, idx: int) -> None:
        """Read more of one text, or of both together, and say that it is text or not."""
        together = [self._held[idx], *([self._held[1 - idx]] if self._data.draw(st.booleans()) else [])]
        together = [one for one in together if len(one.text) < MAX_MODEL_LEN]
        asked = [self._data.draw(st.sampled_from([None, 0, 3])) for _ in together]
        passes = [held.reading(self.draw(1, 60), first) for held, first in zip(together, asked, strict=True)]
        for held, logits in zip(together, self._runner.forward(passes), strict=True):
            held.judge_text(logits)
            if self._data.draw(st.booleans()):
                self._runner.keep(held.slot, len(held.text))

    def _draft(self, held: Held) -> None:
        """Draft candidates in one or two passes, and keep a path of them."""
        room = min(self._room, MAX_MODEL_LEN - len(held.text))
        if not room:
            return
        count = self.draw(1, room)
        is_chain = self._data.draw(st.booleans())
        parents = [node - 1 if is_chain else self.draw(-1, node - 1) for node in range(count)]
        first = self.draw(1, count)
        for part in (slice(0, first), slice(first, count)):
            if parents[part]:
                tokens = [self.draw(0, VOCAB - 1) for _ in parents[part]]
                (logits,) = self._runner.forward([held.drafting(tokens, parents[part])])
                for node, row in zip(range(count)[part], logits, strict=True):
                    held.judge(node, row)
        held.keep(count - 1 if self._data.draw(st.booleans()) else self.draw(-1, count - 1))

    def _fail(self, held: Held) -> None:
        """Interrupt a pass; nothing has happened then."""
        size = min(self.draw(1, 40), MAX_MODEL_LEN - len(held.text))
        if size:
            text = list(held.text)
            with pytest.MonkeyPatch.context() as patch:
                interrupt_passes(patch, self._runner)
                with pytest.raises(KeyboardInterrupt):
                    self._runner.forward([held.reading(size, None)])
            held.text = text

    def _branch(self, held: Held) -> Held:
        """Return a sequence that has copied a beginning of one."""
        length = self.draw(1, len(held.text))
        slot = opened(self._runner)
        self._runner.copy_rows(held.slot, slot, length)
        return Held(self._family, self._runner, slot, held.text[:length])

    def _moved(self, held: Held) -> Held:
        """Return a sequence that holds the rows of one which was written down and closed."""
        rows = self._runner.read_rows(held.slot)
        self._runner.close(held.slot)
        slot = opened(self._runner, max(len(held.text) + self._room, MAX_MODEL_LEN))
        self._runner.write_rows(slot, rows)
        return Held(self._family, self._runner, slot, list(held.text))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30)
@given(data=st.data())
def test_a_rows_logits_are_those_of_its_text_whatever_was_kept_before(family: str, data: st.DataObject) -> None:
    room = data.draw(st.sampled_from(ROOMS))
    runner = runner_of(family, room, data.draw(st.sampled_from(APART)))
    threads, waiting = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from(WAITING))
    with integer_passes_on(threads), waiting_rows(waiting):
        uses = Uses(data, family, runner, room)
        for _ in range(data.draw(st.integers(1, 8))):
            uses.take_one()
        uses.end()


# Rows of the passes in which rings of records grew and lost what they had, by the room for candidates.
GROWING = {12: [(4, 5, 141), (*[1] * 20, 130)], 16: [(9, 12, 16)], 24: [(16, 12, 24)], 32: [(16, 12, 32)]}
GROWING |= {64: [(24, 12, 12, 60), (16, 4, 17, 60)]}


@pytest.mark.parametrize("family", WITH_RECORDS)
@pytest.mark.parametrize(("room", "sizes"), [(room, sizes) for room, orders in GROWING.items() for sizes in orders])
def test_a_ring_that_grows_keeps_what_it_held(family: str, room: int, sizes: Sequence[int]) -> None:
    runner = runner_of(family, room)
    held = Held(family, runner, opened(runner), [])
    for size in sizes:
        (logits,) = runner.forward([held.reading(size, None)])
        held.judge_text(logits)
        runner.keep(held.slot, len(held.text))
    runner.close(held.slot)


@pytest.mark.parametrize("family", WITH_RECORDS)
def test_a_token_below_a_candidate_whose_record_is_gone_is_refused(family: str) -> None:
    """It was computed from whatever lay there."""
    runner = runner_of(family, 12)
    held = Held(family, runner, opened(runner), [])
    runner.forward([held.reading(40, 0)])
    runner.keep(held.slot, 40)
    runner.forward([Extension(held.slot, [5] * 10, [39] * 10)])
    runner.forward([Extension(held.slot, [5] * 10, [49] * 10)])
    with pytest.raises(ModelError, match="whose record is gone"):
        runner.forward([Extension(held.slot, [6], [41])])
    runner.keep(held.slot, 40)
    (logits,) = runner.forward([held.reading(3, None)])
    held.judge_text(logits)
    runner.close(held.slot)


@pytest.mark.parametrize("family", WITH_RECORDS)
def test_a_prompt_that_ends_at_a_landmark_leaves_the_landmark_to_later_texts(family: str) -> None:
    """Its state was written behind the prompt alone, and the next prompt took that place."""
    runner = runner_of(family, 12)
    held = Held(family, runner, opened(runner), [])
    for size in (33, 30):  # behind 32 rows stands a landmark; each prompt's last token is read for its logits
        runner.forward([held.reading(size, 0)])
    slot = opened(runner)
    runner.copy_rows(held.slot, slot, 40)
    other = Held(family, runner, slot, held.text[:40])
    (logits,) = runner.forward([other.reading(5, None)])
    other.judge_text(logits)
    for one in (held, other):
        runner.close(one.slot)


def test_a_thread_that_runs_ahead_leaves_records_as_they_are() -> None:
    """Rows are of other sizes in other layers: a thread in the next one wrote over rows that another had yet to keep.

    On one core the thread that comes last to a barrier goes on to the next one before the other one wakes.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        family, sizes = "qwen3_5_text", (32, 32)
        runner = runner_of.__wrapped__(family, 40)  # whose threads stay on that core
        with integer_passes_on(2):
            for _ in range(20):
                both = [Held(family, runner, opened(runner), []) for _ in sizes]
                runner.forward([held.reading(size, None) for held, size in zip(both, sizes, strict=True)])
                for held in both:
                    (logits,) = runner.forward([held.reading(4, None)])
                    held.judge_text(logits)
                    runner.close(held.slot)
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_gives_nan_leaves_nothing_to_the_next_one(family: str) -> None:
    runner = runner_of(family, 12)
    spoilt, held = opened(runner), Held(family, runner, opened(runner), [])
    width = runner.embeddings([0]).shape[1]
    nan = Extension(spoilt, [1, 2], [-1, 0], inputs=np.full((1, width), np.nan, np.float32))
    (logits,) = runner.forward([nan])
    assert np.isnan(logits).all()
    runner.close(spoilt)
    (logits,) = runner.forward([held.reading(9, None)])
    held.judge_text(logits)
    runner.close(held.slot)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_pool_lends_rows_that_go_on_as_their_text_does(family: str, data: st.DataObject) -> None:
    """Texts that begin alike come and go, grow, wait and return, in memory for few of them."""
    runner = runner_of(family, data.draw(st.sampled_from(ROOMS)))
    state = getattr(runner, "state_bytes", 0)
    pool = SequencePool(runner, 3 * (MAX_MODEL_LEN * runner.row_bytes + state), max_retained=3)
    for _ in range(data.draw(st.integers(2, 5))):
        shared, own = data.draw(st.integers(0, 100)), data.draw(st.integers(1, 40))
        text = [*TEXT[:shared], *[(shared + own + i) % VOCAB for i in range(own)]]
        found = pool.open(text, len(text))
        done = found.num_reused
        while done < len(text):
            size = data.draw(st.integers(1, 70))
            first = done if data.draw(st.booleans()) else -1
            (logits,) = runner.forward([Extension.of_text(found.slot, text[: done + size], done, first_logits=first)])
            done = min(done + size, len(text))
            assert np.array_equal(logits, logits_of(family, tuple(text))[done - len(logits) : done])
        pool.note(found.slot, text)
        slot = pool.grow(found.slot, len(text) + 10)
        more = [*text, *TEXT[:9]]
        (logits,) = runner.forward([Extension.of_text(slot, more, len(text), first_logits=len(text))])
        assert np.array_equal(logits, logits_of(family, tuple(more))[-9:])
        runner.keep(slot, len(text) + data.draw(st.integers(0, 9)))
        pool.close(slot, more[: runner.num_rows(slot)])
    pool.clear()
