"""Records of rows: what layers that sum up a text have taken in of its last rows, and of some rows long ago.

A row's layers without attention need the records of its last ancestors alone. So the cache holds those of the newest
rows, in a ring, and *landmarks*: those of the last rows of each block of 32, behind which a text can be cut and go on.
A row that is dropped has changed nothing, so candidates may be trees, and a rejection costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from card.kernels.number_types import Floats
from card.models.rows.row_tree import IntArray

BLOCK_ROWS = 32  # from landmark to landmark


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Layout of the records of one sequence, each of them float32 and of all layers."""

    width: int  # numbers of a record
    num_needed: int  # last ancestors whose records a row needs
    num_recent: int  # newest rows whose records are held

    @property
    def ring_bytes(self) -> int:
        """Memory of the newest rows' records."""
        return 4 * self.num_recent * self.width

    @property
    def row_bytes(self) -> int:
        """Memory of a row's part in the landmarks, and of its token."""
        return 4 * -(-self.num_needed * self.width // BLOCK_ROWS) + 4

    def records(self, room: Any, capacity: int) -> Records:
        """Return the records of ``capacity`` rows that lie in a room of bytes; none of them is filled."""
        numbers = room.view(np.int32)
        ring, rest = np.split(numbers, [self.num_recent * self.width])
        marks = rest[capacity : capacity + capacity // BLOCK_ROWS * self.num_needed * self.width].view(np.float32)
        ring = ring.view(np.float32).reshape(self.num_recent, self.width)
        return Records(self, ring, marks.reshape(-1, self.width), rest[:capacity])


@dataclass(slots=True)
class Records:
    """The records of one sequence, by the numbers of its rows."""

    layout: RecordLayout
    ring: Floats  # [num_recent, width]
    marks: Floats  # [num_needed for each whole block of rows, width]
    token_ids: Any  # [capacity] int32 of its rows: what lies between landmarks can be computed again
    first: int = 0  # row from which on the ring holds all records

    def note(self, start: int, token_ids: Sequence[int]) -> None:
        """Take the tokens of new rows, whose records a pass is about to fill."""
        end = start + len(token_ids)
        self.token_ids[start:end] = token_ids
        self.first = max(self.first, end - self.layout.num_recent)

    def holds(self, num_rows: int) -> bool:
        """Return whether a text can go on behind its first ``num_rows`` rows, as far as the ring knows."""
        return max(0, num_rows - self.layout.num_needed) >= self.first

    def reach(self, num_rows: int) -> int:
        """Return behind how many of the first ``num_rows`` rows a text can go on."""
        return num_rows if self.holds(num_rows) else num_rows // BLOCK_ROWS * BLOCK_ROWS

    def cut(self, num_rows: int) -> None:
        """Bring the records behind which a text of ``num_rows`` rows goes on back to the ring; see `reach`."""
        if not self.holds(num_rows):
            self.first = max(0, num_rows - self.layout.num_needed)
            rows = np.arange(self.first, num_rows)
            self.ring[rows % len(self.ring)] = self.marks[self._marks_of(rows)]

    def move(self, rows: IntArray, first: int) -> None:
        """Make the records of ascending rows those of as many rows from ``first`` on."""
        new = np.arange(first, first + len(rows))
        self.token_ids[new] = self.token_ids[rows]
        self.ring[new % len(self.ring)] = self.ring[rows % len(self.ring)]
        marks = self._marks_of(new)
        self.marks[marks[marks >= 0]] = self.ring[new[marks >= 0] % len(self.ring)]

    def copy(self, source: Records, num_rows: int) -> None:
        """Take the records of the first rows of another sequence; see `reach`."""
        num_marks = num_rows // BLOCK_ROWS * self.layout.num_needed
        self.marks[:num_marks] = source.marks[:num_marks]
        self.token_ids[:num_rows] = source.token_ids[:num_rows]
        self.ring[...], self.first = source.ring, source.first
        self.cut(num_rows)

    def places(self, rows: IntArray, num_rows: int) -> tuple[IntArray, IntArray]:
        """Return the addresses where the records of new rows are kept, in the ring and as landmarks; 0 for nowhere."""
        step = self.ring.strides[0]
        recent = self.ring.ctypes.data + rows % len(self.ring) * step
        marks = self._marks_of(rows)
        return (
            np.where(rows >= num_rows - len(self.ring), recent, 0),
            np.where(marks >= 0, self.marks.ctypes.data + marks * step, 0),
        )

    def addresses(self, rows: IntArray) -> IntArray:
        """Return where the ring holds the records of rows."""
        found: IntArray = self.ring.ctypes.data + rows % len(self.ring) * self.ring.strides[0]
        return found

    def _marks_of(self, rows: IntArray) -> IntArray:
        """Return which landmarks are those of rows; below 0 for none."""
        needed = self.layout.num_needed
        places = rows % BLOCK_ROWS - (BLOCK_ROWS - needed)
        marks = rows // BLOCK_ROWS * needed + places
        found: IntArray = np.where((places >= 0) & (marks < len(self.marks)), marks, -1)
        return found
