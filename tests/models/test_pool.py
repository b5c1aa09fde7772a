"""The pool against a slow model of itself, and rows reused against rows computed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from card.errors import CapacityError, ModelError, SettingsError
from card.kernels.number_types import Floats
from card.models.protocol import Extension, LanguageModel
from card.models.rows.blocks import MAX_SLACK, SLAB_BYTES
from card.models.rows.kv_cache import MAX_FREE_BYTES
from card.models.rows.pool import BLOCK_ROWS, SequencePool
from card.models.rows.pool_entries import MIN_SHARED_TOKENS
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.examples import settings
from tests.pair import make_model
from tests.reaching_in import cache_of, kv_of, retained_slot
from tests.tiny import CLEAR, tiny
from tests.toy import TableModel

V = 64
BASE = [(7 * i + i * i) % V for i in range(150)]
OTHER = [(5 * i + 3) % V for i in range(150)]


def fill(model: LanguageModel, slot: int, token_ids: Sequence[int]) -> Floats:
    """Compute the rows of the text that are not there yet; return the logits of its last token."""
    start = model.num_rows(slot)
    new = Extension(slot, token_ids[start:], range(start - 1, len(token_ids) - 1), len(token_ids) - start - 1)
    return np.array(model.forward([new])[0][0])


def run(pool: SequencePool, model: LanguageModel, text: Sequence[int], num_rows: int | None = None) -> int:
    """Open a text, compute its rows and retain it; return how many tokens were reused."""
    opened = pool.open(text, num_rows or len(text))
    fill(model, opened.slot, text)
    pool.close(opened.slot, text)
    return opened.num_reused


def blocks(num_rows: int) -> int:
    return -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@dataclass(eq=False)
class Held:
    rows: int
    text: list[int]


@dataclass
class PlainPool:
    """What the pool must do, in the plainest way; counts rows instead of bytes."""

    max_rows: int
    max_retained: int
    running: dict[int, Held] = field(default_factory=dict)
    retained: list[Held] = field(default_factory=list)  # the least recently used first

    def used(self) -> int:
        return sum(held.rows for held in [*self.running.values(), *self.retained])

    def running_rows(self) -> int:
        return sum(held.rows for held in self.running.values())

    def has_room(self, num_rows: int) -> bool:
        return self.running_rows() + blocks(num_rows) <= self.max_rows

    def longest(self, text: list[int]) -> tuple[Held | None, int]:
        live = [*self.running.values(), *self.retained]
        best = max(live, key=lambda held: shared(held.text, text), default=None)
        length = shared(best.text, text) if best else 0
        return (best, length) if length >= MIN_SHARED_TOKENS else (None, 0)

    def open(self, text: list[int], num_rows: int) -> tuple[Held, int]:
        rows, text = blocks(num_rows), text[: min(len(text) - 1, num_rows)]
        while True:
            best, length = self.longest(text)
            lent = [best] if best in self.retained else []
            if self.running_rows() + rows + sum(held.rows for held in lent) <= self.max_rows:
                while self.used() + rows > self.max_rows:
                    self.retained.remove(next(held for held in self.retained if held not in lent))
                self.retained = [held for held in self.retained if held not in lent] + lent
                return Held(rows, text[:length]), length
            self.retained.remove(best)
            if rows <= best.rows <= 2 * rows:
                return Held(best.rows, text[:length]), length

    def close(self, slot: int, text: list[int]) -> None:
        held = self.running.pop(slot)
        holder = next((other for other in self.retained if other.text[: len(text)] == text), None)
        if len(text) < MIN_SHARED_TOKENS:
            return
        if holder:
            self.retained = [other for other in self.retained if other is not holder] + [holder]
            return
        self.retained = [other for other in self.retained if text[: len(other.text)] != other.text]
        needed = blocks(len(text))
        is_roomy = self.used() + held.rows + needed <= self.max_rows
        rows = needed if 2 * needed <= held.rows and is_roomy else held.rows
        self.retained = [*self.retained, Held(rows, text)][-self.max_retained :]


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Texts that often begin alike: a cut of one of three, and then a token or two."""
    start = draw(st.sampled_from([BASE, BASE, OTHER, OTHER[:40] + BASE]))
    cut = draw(st.sampled_from([1, 7, 8, 9, 20, 31, 32, 33, 50, 64, 65, 90, 110]) | st.integers(1, 120))
    return [*start[:cut], *draw(st.sampled_from([[], [], [0], [1], [1, 2]]))]


ACTIONS = st.sampled_from(["open", "open", "open", "close", "close", "grow", "forget"])


@settings(max_examples=40)
@given(
    st.lists(st.tuples(ACTIONS, texts(), st.integers(0, 60)), min_size=8, max_size=40),
    st.integers(2, 14),
    st.integers(1, 6),
)
def test_memory_stays_in_bounds_and_the_longest_text_held_is_reused(
    todo: list[tuple[str, list[int], int]], num_blocks: int, max_retained: int
) -> None:
    model = TableModel(0, V, order=200, num_tree_rows=1000, row_bytes=3)
    pool = SequencePool(model, num_blocks * BLOCK_ROWS * 3 + 50, max_retained=max_retained)
    plain = PlainPool(num_blocks * BLOCK_ROWS, max_retained)
    for action, text, number in todo:
        slots = list(plain.running)
        if action == "open":
            num_rows = len(text) + number
            assert pool.has_room(num_rows) == plain.has_room(num_rows)
            assert pool.can_ever_hold(num_rows) == (blocks(num_rows) <= plain.max_rows)
            if not plain.has_room(num_rows):
                before = pool.stats
                with pytest.raises(CapacityError):
                    pool.open(text, num_rows)
                assert pool.stats == before
                continue
            held, length = plain.open(text, num_rows)
            opened = pool.open(text, num_rows)
            assert opened.num_reused == length == model.num_rows(opened.slot)
            assert model.capacity(opened.slot) >= num_rows
            plain.running[opened.slot] = held
            assert np.array_equal(fill(model, opened.slot, text), model.logits_after(text))
            if number % 2:
                pool.note(opened.slot, text)
                held.text = text
        elif slots and action == "grow":
            slot = slots[number % len(slots)]
            more = [*plain.running[slot].text, *text][: plain.running[slot].rows]
            model.keep(slot, min(len(plain.running[slot].text), model.num_rows(slot)))
            if len(more) > model.num_rows(slot):
                fill(model, slot, more)
            pool.note(slot, more)
            plain.running[slot].text = more
        elif slots:
            slot = slots[number % len(slots)]
            kept = plain.running[slot].text if action == "close" else []
            pool.close(slot, kept)
            plain.close(slot, kept)
        stats = pool.stats
        assert sum(model.capacity(slot) for slot in open_slots(model)) * 3 == stats.used_bytes == plain.used() * 3
        assert stats.used_bytes <= num_blocks * BLOCK_ROWS * 3
        assert stats.retained_bytes == sum(held.rows for held in plain.retained) * 3
        assert (stats.num_open, stats.num_retained) == (len(plain.running), len(plain.retained))
    for slot in plain.running:
        pool.close(slot)
    pool.clear()
    assert model.num_open == pool.stats.used_bytes == 0


def open_slots(model: TableModel) -> Iterator[int]:
    yield from model._sequences


def make_pool(num_blocks: int = 20, **changes: int) -> tuple[SequencePool, TableModel]:
    model = TableModel(1, V, num_tree_rows=400, **changes)
    return SequencePool(model, num_blocks * BLOCK_ROWS), model


def test_a_follow_up_turn_computes_only_what_is_new() -> None:
    pool, model = make_pool()
    assert run(pool, model, BASE[:50], 90) == 0
    num_before = model.num_forward_tokens
    assert run(pool, model, BASE[:80], 100) == 50
    assert model.num_forward_tokens - num_before == 30
    stats = pool.stats
    assert (stats.queries, stats.hits, stats.reused_tokens, stats.num_retained) == (2, 1, 50, 1)


def test_the_last_token_of_a_known_text_is_still_to_be_computed() -> None:
    pool, model = make_pool()
    assert run(pool, model, BASE[:40]) == 0
    assert run(pool, model, BASE[:40]) == 39
    assert pool.open(BASE[:20], 20).num_reused == 19
    assert pool.open([], 10).num_reused == 0
    assert pool.open(BASE[:1], 10).num_reused == 0


@pytest.mark.parametrize(("num_alike", "num_reused"), [(MIN_SHARED_TOKENS - 1, 0), (MIN_SHARED_TOKENS, 8), (9, 9)])
def test_only_a_handful_of_shared_tokens_is_worth_a_copy(num_alike: int, num_reused: int) -> None:
    pool, model = make_pool()
    run(pool, model, BASE[:40])
    assert run(pool, model, [*BASE[:num_alike], *OTHER[70:90]]) == num_reused


def test_a_running_sequence_lends_the_text_that_was_noted_and_no_more() -> None:
    pool, model = make_pool()
    first = pool.open(BASE[:60], 100).slot
    fill(model, first, BASE[:60])
    assert pool.open(BASE[:60], 60).num_reused == 0
    pool.note(first, BASE[:30])
    assert pool.open(BASE[:60], 60).num_reused == 30
    model.forward([Extension(first, [1, 2, 3], [59, 59, 60])])  # candidates
    pool.note(first, BASE[:60])
    second = pool.open(BASE[:70], 70)
    assert second.num_reused == 60
    model.keep(first, 20)
    assert np.array_equal(fill(model, second.slot, BASE[:70]), model.logits_after(BASE[:70]))


@pytest.mark.parametrize(("asked_for", "num_reused"), [(0, 20), (1, 0), (2, 20), (3, 20)])
def test_retained_sequences_give_way_the_least_recently_used_first(asked_for: int, num_reused: int) -> None:
    pool, model = make_pool(num_blocks=4)
    texts = [[i, i + 1] * 10 for i in range(4)]
    for text in texts:
        run(pool, model, text)
    assert pool.has_room(4 * BLOCK_ROWS)
    assert pool.stats.retained_bytes == 4 * BLOCK_ROWS
    opened = pool.open([*texts[0], 60], 21)  # uses the first and drops the second
    assert opened.num_reused == 20
    pool.close(opened.slot)
    assert pool.open([*texts[asked_for], 63], 21).num_reused == num_reused


def test_the_lender_is_taken_over_if_there_is_no_room_for_a_copy() -> None:
    pool, model = make_pool(num_blocks=4)
    run(pool, model, BASE[:90])
    run(pool, model, OTHER[:20])
    opened = pool.open(BASE[:60], 70)
    assert opened.num_reused == 59
    assert model.num_rows(opened.slot) == 59
    assert pool.stats.num_retained == 1  # what was not in the way is still there
    assert pool.open([*OTHER[:20], 1], 21).num_reused == 20


def test_a_large_lender_is_dropped_rather_than_given_to_a_small_request() -> None:
    pool, model = make_pool(num_blocks=5)
    run(pool, model, BASE[:140])
    assert pool.open(BASE[:20], 20).num_reused == 0
    assert pool.stats.used_bytes == BLOCK_ROWS


def test_a_finished_sequence_keeps_only_the_blocks_that_it_needs() -> None:
    pool, model = make_pool(num_blocks=12)
    run(pool, model, BASE[:40], 300)
    assert pool.stats.retained_bytes == 2 * BLOCK_ROWS
    assert run(pool, model, BASE[:45]) == 40


def test_a_text_within_a_retained_one_is_held_once() -> None:
    pool, model = make_pool()
    for length in (30, 60, 45, 60, 10):
        run(pool, model, BASE[:length])
        assert pool.stats.num_retained == 1
    assert run(pool, model, BASE[:70]) == 60


def test_a_text_that_is_retained_already_counts_as_used_again() -> None:
    pool, model = make_pool(num_blocks=3)
    slots = [pool.open(text, 20).slot for text in (BASE[:20], OTHER[:20], BASE[:20])]
    for slot, text in zip(slots, (BASE[:20], OTHER[:20], BASE[:20]), strict=True):
        fill(model, slot, text)
        pool.close(slot, text)
    assert pool.stats.num_retained == 2
    pool.open([1], 64)
    assert pool.open([*BASE[:20], 1], 21).num_reused == 20


def test_a_model_with_fewer_slots_than_the_pool_has_bytes_evicts_too() -> None:
    pool, model = make_pool(max_slots=2)
    run(pool, model, BASE[:20])
    run(pool, model, OTHER[:20])
    assert run(pool, model, OTHER[:30]) == 20
    first, second = pool.open([1], 5).slot, pool.open(OTHER[:31], 31)
    assert second.num_reused == 30  # taken over: there is no slot to copy it to
    with pytest.raises(CapacityError, match="slots are open"):
        pool.open([1], 5)
    pool.close(first)
    pool.close(second.slot)
    assert model.num_open == 0


def test_a_caller_who_errs_is_told_and_nothing_changes() -> None:
    pool, model = make_pool(num_blocks=4)
    slot = pool.open(BASE[:20], 40).slot
    fill(model, slot, BASE[:20])
    before = pool.stats
    for call in (pool.note, pool.close):
        with pytest.raises(ModelError, match=r"holds 20 rows, too few for a text of 21 tokens"):
            call(slot, BASE[:21])
        with pytest.raises(ModelError, match=r"slot 99 is not running.*\[0\]"):
            call(99, ())
    with pytest.raises(CapacityError, match=r"65 KV rows do not fit.*64 of 128 bytes are in use"):
        pool.open([1], 65)
    assert pool.stats == before
    assert not pool.can_ever_hold(4 * BLOCK_ROWS + 1)
    pool.close(slot)
    with pytest.raises(ModelError, match="not running"):
        pool.close(slot)
    with pytest.raises(SettingsError, match="64 bytes or more for this model, got 63"):
        SequencePool(TableModel(0, V, row_bytes=2), 63)
    with pytest.raises(SettingsError, match="max_retained"):
        SequencePool(model, 1000, max_retained=-1)


def test_a_model_of_few_rows_fills_no_whole_block() -> None:
    model = TableModel(0, V, max_model_len=40, num_tree_rows=5)
    pool = SequencePool(model, 50)
    assert pool.can_ever_hold(45)
    assert not pool.can_ever_hold(46)
    assert model.capacity(pool.open([1], 44).slot) == 45


@functools.cache
def torch_model(name: str) -> PreTrainedModel:
    if name == "llama":
        return make_model(V)
    torch.manual_seed(1)
    config = MistralConfig(**tiny(V, sliding_window=11, initializer_range=CLEAR))
    return MistralForCausalLM(config).train(False)


def make_runner(name: str, own_pass: bool) -> RowRunner:
    return plain_runner(copy.deepcopy(torch_model(name)), max_model_len=200, max_tree_rows=30, own_pass=own_pass)


@pytest.mark.parametrize("own_pass", [True, False])
@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_reused_prefix_has_the_rows_of_its_source_and_the_logits_of_a_fresh_prefill(
    name: str, own_pass: bool
) -> None:
    runner = make_runner(name, own_pass)
    pool = SequencePool(runner, 60 * BLOCK_ROWS * runner.row_bytes)
    source = pool.open(BASE[:100], 140).slot
    fill(runner, source, BASE[:60])
    fill(runner, source, BASE[:100])
    runner.forward([Extension(source, [1, 2, 3], [99, 99, 100])])  # candidates, not part of the text
    pool.note(source, BASE[:100])
    for num_alike in (8, 9, 31, 32, 33, 64, 99, 100):
        text = [*BASE[:num_alike], *(t + 1 if t < V - 1 else 0 for t in BASE[num_alike : num_alike + 7]), 5]
        opened = pool.open(text, len(text) + 20)
        assert opened.num_reused == num_alike
        rows, lent = (np.asarray(kv_of(runner, slot, num_alike)) for slot in (opened.slot, source))
        assert np.array_equal(rows, lent)
        assert cache_of(runner)[opened.slot].tree.positions().tolist() == list(range(num_alike))
        fresh = runner.open(len(text))
        np.testing.assert_allclose(fill(runner, opened.slot, text), fill(runner, fresh, text), atol=1e-5, rtol=1e-5)
        runner.close(fresh)
        pool.close(opened.slot, text)
        if num_alike == 33:  # from here on the source is a retained sequence
            pool.close(source, BASE[:100])
            source = retained_slot(pool, 100)
    assert pool.stats.hits == 8


def test_the_memory_of_a_real_model_stays_bounded_over_many_requests() -> None:
    runner = make_runner("llama", True)
    max_bytes = 40 * BLOCK_ROWS * runner.row_bytes
    pool = SequencePool(runner, max_bytes)
    random = torch.Generator().manual_seed(0)
    running: dict[int, list[int]] = {}  # the text noted of each slot
    for i in range(1500):
        length, num_rows = (int(x) for x in torch.randint(1, 100, (2,), generator=random))
        text = [*(BASE if i % 3 else OTHER)[: length // 2], i % V, *BASE[-length:]][:length]
        if pool.has_room(length + num_rows):
            opened = pool.open(text, length + num_rows)
            slot = opened.slot
            running[slot] = text[: opened.num_reused]
            if i % 10 == 0:
                fill(runner, slot, text)
                pool.note(slot, text)
                running[slot] = text
        else:
            slot = next(iter(running))
            noted = running.pop(slot)
            pool.close(slot, noted if i % 2 else [])
        assert pool.stats.used_bytes <= max_bytes
        assert cache_of(runner).num_bytes <= MAX_SLACK * max_bytes + MAX_FREE_BYTES
    for slot in running:
        pool.close(slot)
    pool.clear()
    assert cache_of(runner).num_bytes == cache_of(runner).free_bytes
    assert cache_of(runner).num_bytes <= SLAB_BYTES  # however many requests there were


def test_a_sequence_that_grows_keeps_its_rows_and_its_text_and_is_counted_once() -> None:
    model = TableModel(0, vocab_size=V, max_model_len=200)
    pool = SequencePool(model, 5 * BLOCK_ROWS)
    slot = pool.open(BASE[:20], 20).slot
    fill(model, slot, BASE[:20])
    pool.note(slot, BASE[:20])
    pool.close(pool.open(OTHER[:20], 20).slot)
    grown = pool.grow(slot, 70)
    assert (model.num_rows(grown), model.capacity(grown), model.num_open) == (20, blocks(70), 1)
    assert pool.stats.used_bytes == blocks(70)
    assert pool.open(BASE[:20], 20).num_reused == 19, "its rows can be copied as before"
    wanted = fill(model, model.open(BLOCK_ROWS), BASE[:21])
    assert np.array_equal(fill(model, grown, BASE[:21]), wanted)


def test_a_sequence_that_cannot_grow_stays_as_it_is() -> None:
    model = TableModel(0, vocab_size=V, max_model_len=200)
    pool = SequencePool(model, 4 * BLOCK_ROWS)
    slot = pool.open(BASE[:20], 20).slot
    pool.open((), 2 * BLOCK_ROWS)
    with pytest.raises(CapacityError, match="do not fit"):
        pool.grow(slot, 3 * BLOCK_ROWS)
    assert model.capacity(slot) == BLOCK_ROWS and pool.stats.used_bytes == 3 * BLOCK_ROWS
    assert pool.grow(slot, 2 * BLOCK_ROWS) != slot
