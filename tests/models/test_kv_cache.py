"""Buffers of the KV cache: sized per sequence, used again, and bounded in all."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from card.errors import CapacityError, ModelError
from card.kernels import number_types
from card.kernels.jit.tables import CACHE_ROWS
from card.kernels.number_types import FLOAT32
from card.models.rows import blocks, kv_layout
from card.models.rows.kv_cache import KVCache
from card.models.rows.kv_layout import KVLayout, KVShape
from card.models.rows.parts import RowsPart

LAYOUT = KVLayout((KVShape(3, 4),) * 2, FLOAT32)
ROW_BYTES = 2 * 2 * 3 * 4 * 4
LINE = 64  # bytes that a buffer has more, to begin where it should


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SLAB_BYTES", 4 * CACHE_ROWS * ROW_BYTES)


def chain_of(cache: KVCache, num_rows: int, max_rows: int | None = None) -> int:
    """Open a sequence with rows of random numbers."""
    slot = cache.open(max_rows)
    append(cache, slot, num_rows)
    return slot


def append(cache: KVCache, slot: int, num_rows: int) -> None:
    rng = np.random.default_rng(cache[slot].tree.num_rows + 1000 * slot)
    rows, first = rng.standard_normal(num_rows * ROW_BYTES // 4).astype(np.float32), cache[slot].tree.num_rows
    cache.append_part(slot, RowsPart(first, first + num_rows, False), rows.view(np.uint8), num_rows)


def rows_of(cache: KVCache, slot: int, num_rows: int | None = None) -> Any:
    return cache.read_part(slot, RowsPart(0, num_rows or cache[slot].tree.num_rows, False)).view(np.float32)


def test_a_sequence_has_the_room_that_it_asked_for() -> None:
    cache = KVCache(LAYOUT, 100)
    assert cache.row_bytes == ROW_BYTES
    assert cache[cache.open()].tree.max_rows == 100
    slot = cache.open(7)
    assert cache[slot].tree.max_rows == 7
    assert cache.held_bytes([0, slot]) == 107 * ROW_BYTES
    assert cache.num_bytes == 0, "rows that are not there yet take no memory"
    for wrong in (0, -1, 101):
        with pytest.raises(CapacityError, match=f"1 to 100 rows, got {wrong}"):
            cache.open(wrong)


def test_a_slot_number_is_never_used_twice() -> None:
    cache = KVCache(LAYOUT, 100)
    seen = [cache.open(5)]
    for _ in range(5):
        cache.close(seen[-1])
        seen.append(cache.open(5))
    assert len(set(seen)) == 6
    for stale in seen[:-1]:
        with pytest.raises(ModelError, match="not open"):
            cache.close(stale)
        with pytest.raises(ModelError, match="not open"):
            cache.copy_rows(stale, seen[-1], 0)


def test_memory_of_closed_sequences_serves_later_ones() -> None:
    cache = KVCache(LAYOUT, 1000)
    slot = chain_of(cache, 100)
    addresses, held = set(cache[slot].places[:4].tolist()), cache.num_bytes
    cache.close(slot)
    assert cache.num_bytes == cache.free_bytes == held
    other = chain_of(cache, 100)
    assert set(cache[other].places[:4].tolist()) == addresses and cache.num_bytes == held
    cache.close(other)
    cache.drop_free()
    assert cache.num_bytes == 0


@pytest.mark.parametrize("num_rows", [5, CACHE_ROWS, CACHE_ROWS + 1, 3 * CACHE_ROWS, 100])
def test_a_copy_shares_whole_blocks_and_each_sees_its_own_rows_alone(num_rows: int) -> None:
    cache = KVCache(LAYOUT, 200)
    source, slot = chain_of(cache, 100), cache.open(160)
    before, rows = rows_of(cache, source), rows_of(cache, source, num_rows)
    cache.copy_rows(source, slot, num_rows)
    num_shared = num_rows // CACHE_ROWS
    assert cache[source].blocks[:num_shared] == cache[slot].blocks[:num_shared]
    assert not set(cache[source].numbers[num_shared:4]) & set(cache[slot].numbers[num_shared : len(cache[slot].blocks)])
    whole = (200 + 160) * ROW_BYTES
    assert cache.held_bytes([source, slot]) == whole - cache.shared_bytes(num_rows)
    assert cache.shared_bytes(num_rows) == num_shared * CACHE_ROWS * ROW_BYTES
    assert np.array_equal(rows_of(cache, slot), rows)
    append(cache, slot, 40)
    for other, kept in ((source, 3), (slot, 2)):  # each goes back into what both have, and on in another way
        cache.keep(other, kept)
        append(cache, other, 90)
        assert np.array_equal(rows_of(cache, source, kept), rows_of(cache, slot, kept))
    assert not np.array_equal(rows_of(cache, source, 60), before[: rows_of(cache, source, 60).size])
    assert cache.held_bytes([source, slot]) == whole, "nothing is shared by now"
    third = cache.open()
    cache.copy_rows(slot, third, 80)
    expected = rows_of(cache, third)
    cache.close(slot)
    append(cache, source, 50)
    assert np.array_equal(rows_of(cache, third), expected), "what one of two gave up is the other's"
    for one in (source, third):
        cache.close(one)
    assert cache.num_bytes == cache.free_bytes


def test_candidates_that_are_kept_move_across_blocks_and_leave_shared_ones_alone() -> None:
    cache = KVCache(LAYOUT, 200)
    source, slot = chain_of(cache, 64), cache.open()
    cache.copy_rows(source, slot, 64)
    before = rows_of(cache, source)
    cache[slot].tree.append(np.array([20, 20, 65, *[64] * 40, 66]))  # row 107 below 66, below 65
    cache.make_room(slot, 64)
    rows = np.random.default_rng(0).standard_normal((2, 2, 3, 44, 4)).astype(np.float32)
    cache[slot].write(64, 108, [rows])
    cache.keep(slot, 21, [65, 66, 107])
    found = rows_of(cache, slot).reshape(2, 2, 3, 24, 4)
    assert np.array_equal(found[:, :, :, 21:], rows[:, :, :, [1, 2, 43]])
    assert np.array_equal(found[:, :, :, :21], before.reshape(2, 2, 3, 64, 4)[:, :, :, :21])
    assert np.array_equal(rows_of(cache, source), before)


def test_rows_taken_out_can_be_put_back() -> None:
    cache = KVCache(LAYOUT, 200)
    slot = chain_of(cache, 70)
    rows, other = cache.read_rows(slot), cache.open()
    cache.write_rows(other, rows)
    assert np.array_equal(rows_of(cache, other), rows_of(cache, slot))


def test_rows_that_cannot_be_copied_are_refused_and_nothing_changes() -> None:
    cache = KVCache(LAYOUT, 100)
    source, full, small = chain_of(cache, 10), chain_of(cache, 2), cache.open(5)
    cache[source].tree.append(np.array([3, 10]))  # a fork: rows 10 and 11 are no part of the chain
    refused: list[tuple[type[Exception], int, int]] = [
        (ModelError, full, 1),
        (ModelError, small, 11),
        (ModelError, small, -1),
        (CapacityError, small, 6),
        (ModelError, source, 0),
    ]
    for error, slot, num_rows in refused:
        with pytest.raises(error):
            cache.copy_rows(source, slot, num_rows)
        assert [cache[s].tree.num_rows for s in (source, full, small)] == [12, 2, 0]
    cache.copy_rows(source, small, 0)
    cache.copy_rows(source, small, 5)


def live_bytes() -> int:
    """Return the memory of all buffers that Python still reaches; tracemalloc must be running."""
    gc.collect()
    made_there = tracemalloc.Filter(True, number_types.__file__, domain=np.lib.tracemalloc_domain)
    return sum(one.size - LINE for one in tracemalloc.take_snapshot().filter_traces([made_there]).traces)


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("_traced")
def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    before = live_bytes()
    max_free_bytes = 500 * ROW_BYTES
    cache = KVCache(LAYOUT, 1000, max_free_bytes=max_free_bytes)
    rng = random.Random(0)
    slots: list[int] = []
    for _ in range(2000):
        if len(slots) < 6 and rng.random() < 0.5:
            slots.append(chain_of(cache, rng.choice([rng.randint(1, 30), rng.randint(1, 1000)])))
            if len(slots) > 1 and rng.random() < 0.5:
                slots.append(cache.open())
                cache.copy_rows(slots[-2], slots[-1], rng.randint(1, cache[slots[-2]].tree.num_rows))
        elif slots:
            cache.close(slots.pop(rng.randrange(len(slots))))
        assert cache.free_bytes <= max_free_bytes
    assert 0 < live_bytes() - before <= cache.num_bytes
    for slot in slots:
        cache.close(slot)
    assert live_bytes() - before <= cache.num_bytes <= max_free_bytes


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])  # of the system, and of torch
def test_a_device_without_memory_gets_the_free_buffers_back_before_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    cache = KVCache(LAYOUT, 1000)
    make = kv_layout.paged_zeros
    slab = 4 * CACHE_ROWS

    def scarce(num_elements: int, dtype: Any) -> Any:
        if num_elements * 4 + cache.num_bytes > 3 * slab * ROW_BYTES:
            raise error("out of memory")
        return make(num_elements, dtype)

    monkeypatch.setattr(kv_layout, "paged_zeros", scarce)
    chain_of(cache, slab)
    cache.close(chain_of(cache, 2 * slab))
    slot = cache.open()
    cache[slot].tree.append(np.arange(-1, 2 * slab - 1))
    cache.make_room(slot, 0)
    other = cache.open()
    with pytest.raises(CapacityError, match=f"no memory for {slab * ROW_BYTES} bytes"):
        append(cache, other, 1)
    assert cache[other].tree.num_rows == 0
    with pytest.raises(CapacityError, match="no memory"):
        cache.copy_rows(slot, other, CACHE_ROWS + 1)
    assert cache[other].tree.num_rows == 0
    cache.close(slot)
    append(cache, other, 1)
