"""Landmarks: what a text goes on from behind some of its rows. Sequences that begin alike share them, by counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from card.kernels.number_types import Floats
from card.machine.memory import take_large_pages
from card.models.rows.blocks import FreeBuffers


class Landmark:
    """The records of the rows before one place of a text, and the state there."""

    __slots__ = ("address", "buffer", "num_users", "numbers", "records", "state", "state_address")

    def __init__(self, numbers: Floats, width: int, num_needed: int, buffer: Any = None) -> None:
        """Take float32 numbers that hold the records [num_needed, width], and the state behind them."""
        self.numbers, self.buffer = numbers, buffer
        self.records, self.state = (
            numbers[: num_needed * width].reshape(num_needed, width),
            numbers[num_needed * width :],
        )
        self.address, self.state_address = int(self.records.ctypes.data), int(self.state.ctypes.data)
        self.num_users = 1  # sequences that it belongs to


class Landmarks:
    """All landmarks of a cache."""

    def __init__(self, free: FreeBuffers, itemsize: int, *, width: int, num_needed: int, state_size: int) -> None:
        """Take memory from ``free``, whose numbers have ``itemsize`` bytes."""
        self._free, self._width, self._num_needed = free, width, num_needed
        self._size = num_needed * width + state_size
        self._num_elements = -(-4 * self._size // itemsize)
        self.num_bytes = 0

    def make(self) -> Landmark:
        """Return one with whatever is in its memory. Raises: CapacityError if there is none."""
        buffer = self._free.take(self._num_elements)
        take_large_pages(buffer.ctypes.data, buffer.nbytes)
        self.num_bytes += int(buffer.nbytes)
        numbers = buffer[: self._num_elements].view(np.float32)[: self._size]
        return Landmark(numbers, self._width, self._num_needed, buffer)

    def release(self, one: Landmark) -> None:
        """Count a user less; the memory of one without users is free."""
        one.num_users -= 1
        if not one.num_users:
            self.num_bytes -= int(one.buffer.nbytes)
            self._free.give(one.buffer)
