"""Blocks of rows: what sequences that begin alike share. Each is counted, and freed with its last user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from card.errors import CapacityError
from card.machine.memory import take_large_pages
from card.models.rows.kv_layout import KVLayout
from card.models.rows.row_tree import IntArray

SLAB_BYTES, _MOST_BLOCKS = 2**24, 1024  # of a slab: eight large pages, and few enough that one is soon unused again
MAX_SLACK = 2  # a kept buffer serves who needs at least this part of it


class _Slab:
    """Memory of several blocks. In pages of 2 MB: blocks of one layer are far apart, and small pages cost 5 to 20 %."""

    __slots__ = ("buffer", "num_blocks", "unused")

    def __init__(self, buffer: Any, num_blocks: int) -> None:
        self.buffer, self.num_blocks = buffer, num_blocks
        self.unused = list(range(num_blocks))[::-1]


class Block:
    """Rows that lie together; a sequence's first rows are those of its first block."""

    __slots__ = ("address", "num_users", "number", "place", "runs", "slab")

    def __init__(self, number: int, slab: _Slab, place: int, part: Any, runs: list[Any]) -> None:
        self.number, self.slab, self.place, self.runs = number, slab, place, runs
        self.address = part.ctypes.data if isinstance(part, np.ndarray) else 0
        self.num_users = 1  # sequences that it belongs to


class FreeBuffers:
    """Memory that nobody uses, kept for the next one who needs some: new memory costs page faults.

    Who needs memory gets the smallest buffer that is large enough and at most MAX_SLACK times as large as needed. Those
    of a size that nobody gave back for longest go first.
    """

    def __init__(self, layout: KVLayout, max_bytes: int) -> None:
        self._layout, self._max_bytes = layout, max_bytes
        self._by_size: dict[int, list[Any]] = {}
        self.num_bytes = 0

    def take(self, num_elements: int) -> Any:
        """Return a buffer of at least so many numbers. Raises: CapacityError if the device has no memory."""
        fitting = [size for size in self._by_size if num_elements <= size <= MAX_SLACK * num_elements]
        if fitting:
            return self._pop(min(fitting))
        try:
            return self._layout.make(num_elements)
        except (MemoryError, RuntimeError):  # no memory, of the CPU or of a device
            self.clear()
        try:
            return self._layout.make(num_elements)
        except (MemoryError, RuntimeError) as error:
            num_bytes = num_elements * self._layout.dtype.itemsize
            raise CapacityError(
                f"{self._layout.device} has no memory for {num_bytes} bytes of KV rows; close other sequences, or"
                " allow fewer or shorter ones"
            ) from error

    def give(self, buffer: Any) -> None:
        """Take a buffer back."""
        size = len(buffer)
        alike = self._by_size.pop(size, [])
        self._by_size[size] = alike  # last, as it was used last
        alike.append(buffer)
        self.num_bytes += int(buffer.nbytes)
        while self.num_bytes > self._max_bytes:
            self._pop(next(iter(self._by_size)))

    def clear(self) -> None:
        """Give all memory back to the system."""
        self._by_size.clear()
        self.num_bytes = 0

    def _pop(self, size: int) -> Any:
        alike = self._by_size[size]
        buffer = alike.pop()
        if not alike:
            del self._by_size[size]
        self.num_bytes -= int(buffer.nbytes)
        return buffer


class Blocks:
    """All blocks of a cache, by numbers that are used again."""

    def __init__(self, layout: KVLayout, free: FreeBuffers) -> None:
        self._layout, self._free = layout, free
        self._slabs: dict[_Slab, None] = {}  # those with unused blocks, besides used ones
        self._sizes = np.zeros(0, np.int64)  # rows that each block counts as
        self._unused: list[int] = []  # numbers
        self.num_bytes = 0

    def make(self, size: int, num_rows: int) -> Block:
        """Return a new block with room for ``size`` rows that counts as ``num_rows``.

        Raises: CapacityError if the device has no memory for it.
        """
        num_elements = size * self._layout.row_elements
        slab = next(reversed(self._slabs)) if self._slabs else self._new_slab(num_elements)
        place = slab.unused.pop()
        if not slab.unused:
            self._slabs.pop(slab, None)
        if not self._unused:
            first, last = len(self._sizes), max(64, 2 * len(self._sizes))
            self._sizes = np.concatenate([self._sizes, np.zeros(last - first, np.int64)])
            self._unused = list(range(first, last))
        number = self._unused.pop()
        self._sizes[number] = num_rows
        part = slab.buffer[place * num_elements : (place + 1) * num_elements]
        return Block(number, slab, place, part, self._layout.runs(part, size))

    def _new_slab(self, num_elements: int) -> _Slab:
        """Return memory for blocks of so many numbers, or for one if sequences share none."""
        if self._layout.block_rows is None:
            slab = _Slab(self._free.take(num_elements), 1)
        else:
            num_bytes = max(1, num_elements * self._layout.dtype.itemsize)
            num_blocks = max(1, min(_MOST_BLOCKS, SLAB_BYTES // num_bytes))
            slab = _Slab(self._free.take(num_blocks * num_elements), num_blocks)
            take_large_pages(slab.buffer.ctypes.data, slab.buffer.nbytes)
        self._slabs[slab] = None
        self.num_bytes += int(slab.buffer.nbytes)
        return slab

    def release(self, block: Block) -> None:
        """Count a user less; a block without users is unused, and a slab of such blocks free memory."""
        block.num_users -= 1
        if block.num_users:
            return
        slab = block.slab
        self._unused.append(block.number)
        slab.unused.append(block.place)
        self._slabs[slab] = None
        if len(slab.unused) == slab.num_blocks:
            del self._slabs[slab]
            self.num_bytes -= int(slab.buffer.nbytes)
            self._free.give(slab.buffer)

    def num_rows(self, block_numbers: Sequence[IntArray]) -> int:
        """Return the rows of some sequences' blocks, by their numbers; a block of several counts once."""
        is_used = np.zeros(len(self._sizes), np.bool_)
        for numbers in block_numbers:
            is_used[numbers] = True
        return int(self._sizes[is_used].sum())
