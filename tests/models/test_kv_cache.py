"""Buffers of the KV cache: sized per sequence, used again, and bounded in all."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from card.errors import CapacityError, ModelError
from card.kernels import number_types
from card.kernels.number_types import FLOAT32
from card.models.rows import kv_cache
from card.models.rows.kv_cache import MAX_SLACK, KVCache, KVLayout, KVShape

LAYOUT = KVLayout((KVShape(3, 4),) * 2, FLOAT32)
ROW_BYTES = 2 * 2 * 3 * 4 * 4
LINE = 64  # bytes that a buffer has more, to begin where it should


def chain_of(cache: KVCache, num_rows: int, max_rows: int | None = None) -> int:
    """Open a sequence with rows of random numbers."""
    slot = cache.open(max_rows)
    cache[slot].tree.append(np.arange(-1, num_rows - 1))
    cache[slot].kv[:, :, :, :num_rows] = np.random.default_rng(slot).standard_normal((2, 2, 3, num_rows, 4))
    return slot


def memory_of(cache: KVCache, slot: int) -> int:
    return int(cache[slot].kv.ctypes.data)


def test_a_sequence_has_the_room_that_it_asked_for() -> None:
    cache = KVCache(LAYOUT, 100)
    assert cache.row_bytes == ROW_BYTES
    assert cache[cache.open()].kv.shape == (2, 2, 3, 100, 4)
    slot = cache.open(7)
    assert cache[slot].kv.shape == (2, 2, 3, 7, 4)
    assert cache[slot].tree.max_rows == 7
    assert cache.num_bytes == 107 * ROW_BYTES
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


def test_the_smallest_free_buffer_that_suffices_is_used_again() -> None:
    cache = KVCache(LAYOUT, 1000)
    slots = {rows: cache.open(rows) for rows in (40, 60, 100)}
    memory = {rows: memory_of(cache, slot) for rows, slot in slots.items()}
    for slot in slots.values():
        cache.close(slot)
    held = cache.num_bytes
    assert memory_of(cache, cache.open(50)) == memory[60]
    assert memory_of(cache, cache.open(50)) == memory[100]
    assert cache.num_bytes == held
    too_small = cache.open(40 // MAX_SLACK - 1)
    assert memory_of(cache, too_small) not in memory.values()
    assert cache.num_bytes == held + 19 * ROW_BYTES


def test_the_rows_of_a_reused_buffer_are_the_new_sequences_own() -> None:
    cache = KVCache(LAYOUT, 100)
    cache.close(chain_of(cache, 60, 60))
    first = chain_of(cache, 35, 40)
    other = chain_of(cache, 30, 30)
    before = cache[first].kv[:, :, :, :35].copy()
    cache[other].kv.fill(9.0)
    assert np.array_equal(cache[first].kv[:, :, :, :35], before)
    assert cache[first].kv.flags.c_contiguous


def test_rows_are_copied_bit_for_bit_and_then_live_on_their_own() -> None:
    cache = KVCache(LAYOUT, 100)
    source, slot = chain_of(cache, 20, 30), cache.open(12)
    cache.copy_rows(source, slot, 12)
    rows = cache[source].kv[:, :, :, :12].copy()
    assert np.array_equal(cache[slot].kv, rows)
    assert cache[slot].tree.positions().tolist() == list(range(12))
    cache[source].kv.fill(0.0)
    cache.keep(source, 3)
    assert np.array_equal(cache[slot].kv, rows)
    assert cache[slot].tree.num_rows == cache[slot].tree.num_prefix_rows == 12


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
    for _ in range(5000):
        if len(slots) < 6 and rng.random() < 0.5:
            slots.append(cache.open(rng.choice([rng.randint(1, 30), rng.randint(1, 1000)])))
        elif slots:
            cache.close(slots.pop(rng.randrange(len(slots))))
        asked = sum(cache[slot].tree.max_rows for slot in slots) * ROW_BYTES
        assert cache.free_bytes <= max_free_bytes
        assert cache.num_bytes <= MAX_SLACK * asked + max_free_bytes
    assert 0 < live_bytes() - before <= cache.num_bytes
    for slot in slots:
        cache.close(slot)
    assert live_bytes() - before <= cache.num_bytes <= max_free_bytes


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="the system has no huge pages")
def test_memory_is_taken_page_by_page_as_rows_are_written() -> None:
    """A row has a part in the array of each head: were pages of 2 MB taken, the first row would take all of it."""
    layout = KVLayout((KVShape(4, 64),) * 8, FLOAT32)
    cache = KVCache(layout, 4096)
    slot = cache.open()
    assert num_pages_in_memory(cache[slot].buffer) == 0
    cache[slot].kv[:, :, :, 0] = 1.0
    assert num_pages_in_memory(cache[slot].buffer) == 8 * 2 * 4


def num_pages_in_memory(array: Any) -> int:
    flags = np.zeros(-(-array.nbytes // mmap.PAGESIZE), np.uint8)
    system = ctypes.CDLL(None, use_errno=True)
    place, size, found = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), ctypes.c_void_p
    assert system.mincore(place, size, found(flags.ctypes.data)) == 0
    return int((flags & 1).sum())


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])  # of the system, and of torch
def test_a_device_without_memory_gets_the_free_buffers_back_before_a_sequence_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    cache = KVCache(LAYOUT, 1000)
    make = kv_cache.paged_zeros

    def scarce(num_elements: int, dtype: Any) -> Any:
        if num_elements * 4 + cache.num_bytes > 500 * ROW_BYTES:
            raise error("out of memory")
        return make(num_elements, dtype)

    monkeypatch.setattr(kv_cache, "paged_zeros", scarce)
    cache.open(200)
    cache.close(cache.open(250))
    slot = cache.open(300)
    assert cache.num_bytes == 500 * ROW_BYTES
    with pytest.raises(CapacityError, match=f"no memory for {ROW_BYTES} bytes"):
        cache.open(1)
    cache.close(slot)
    cache.open(300)
