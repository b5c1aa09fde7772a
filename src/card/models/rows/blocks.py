"""Blocks of rows: what sequences that begin alike share. Each is counted, and freed with its last user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from card.errors import CapacityError
from card.models.rows.kv_layout import KVLayout
from card.models.rows.row_tree import IntArray

MAX_SLACK = 2  # a kept buffer serves who needs at least this part of it


class Block:
    """Rows that lie together; a sequence's first rows are those of its first block."""

    __slots__ = ("address", "buffer", "num_users", "number", "runs")

    def __init__(self, number: int, buffer: Any, runs: list[Any]) -> None:
        self.number, self.buffer, self.runs = number, buffer, runs
        self.address = buffer.ctypes.data if isinstance(buffer, np.ndarray) else 0
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
        self._sizes = np.zeros(0, np.int64)  # rows that each counts as
        self._unused: list[int] = []
        self.num_bytes = 0

    def make(self, size: int, num_rows: int) -> Block:
        """Return a new block with room for ``size`` rows that counts as ``num_rows``.

        Raises: CapacityError if the device has no memory for it.
        """
        buffer = self._free.take(size * self._layout.row_elements)
        if not self._unused:
            first, last = len(self._sizes), max(64, 2 * len(self._sizes))
            self._sizes = np.concatenate([self._sizes, np.zeros(last - first, np.int64)])
            self._unused = list(range(first, last))
        number = self._unused.pop()
        self._sizes[number] = num_rows
        self.num_bytes += int(buffer.nbytes)
        return Block(number, buffer, self._layout.runs(buffer, size))

    def release(self, block: Block) -> None:
        """Count a user less; a block without users is free memory."""
        block.num_users -= 1
        if not block.num_users:
            self._unused.append(block.number)
            self.num_bytes -= int(block.buffer.nbytes)
            self._free.give(block.buffer)

    def num_rows(self, of: Sequence[IntArray]) -> int:
        """Return the rows of some sequences' blocks, by their numbers; a block of several counts once."""
        is_used = np.zeros(len(self._sizes), np.bool_)
        for numbers in of:
            is_used[numbers] = True
        return int(self._sizes[is_used].sum())
