"""Records of rows: what layers that sum up a text have taken in of its last rows, and of some rows long ago.

A row's layers without attention need the records of its last ancestors alone. So the cache holds those of the newest
rows, in a ring, and *landmarks*: those of the last rows of each block of 32, behind which a text can be cut and go on.
A row that is dropped has changed nothing, so candidates may be trees, and a rejection costs nothing.

Some layers keep states that depend on all rows before. Those of the first rows of a text are *absorbed*: the sequence
has one state behind these, and rows behind them go on from it by their records. Landmarks hold the state there, too.
They are further apart, and one more stands behind the prompt, which is what the next text shares most often. As their
records are large, the ring begins with few places, and gets more when more rows are in doubt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import Floats
from card.kernels.packed_linear import padded
from card.models.rows.row_tree import IntArray

BLOCK_ROWS = 32  # from landmark to landmark
_NUM_FACTS = 4
_FEW_PLACES = 8  # of a ring at first, and more at once: a text without candidates needs 4


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Layout of the records of one sequence, each of them float32 and of all layers."""

    width: int  # numbers of a record
    num_needed: int  # last ancestors whose records a row needs
    num_recent: int  # newest rows whose records are held
    state_size: int = 0  # numbers of the states; 0 if there are none
    block_rows: int = BLOCK_ROWS  # from landmark to landmark

    @property
    def ring_bytes(self) -> int:
        """Memory of the newest rows' records, and with a state of this one and of the landmark behind the prompt."""
        with_state = _NUM_FACTS + self.state_size + self._mark_size if self.state_size else 0
        return 4 * (self.num_recent * self.width + with_state)

    @property
    def _mark_size(self) -> int:
        """Numbers of a landmark."""
        return self.num_needed * self.width + self.state_size

    @property
    def mark_bytes(self) -> int:
        """Memory of a landmark."""
        return 4 * self._mark_size

    @property
    def row_bytes(self) -> int:
        """Memory of a row's part in the landmarks, and of its token."""
        return 4 * -(-self._mark_size // self.block_rows) + 4

    def records(self, room: Any, capacity: int) -> Records:
        """Return the records of ``capacity`` rows that lie in a room of bytes; none of them is filled."""
        numbers = room.view(np.int32)
        num_marks, parts = capacity // self.block_rows, self._parts(numbers, capacity)
        ring, facts, state, inputs, behind_prompt, token_ids, rest = parts
        marks, states = np.split(rest[: num_marks * self._mark_size], [num_marks * self.num_needed * self.width])
        return Records(
            self,
            ring.view(np.float32).reshape(self.num_recent, self.width),
            marks.view(np.float32).reshape(-1, self.width),
            token_ids,
            facts,
            state.view(np.float32),
            states.view(np.float32).reshape(num_marks, self.state_size),
            inputs.view(np.float32).reshape(-1, self.width),
            behind_prompt.view(np.float32),
            min(_FEW_PLACES, self.num_recent) if self.state_size else self.num_recent,
        )

    def _parts(self, numbers: Any, capacity: int) -> list[Any]:
        """Return ring, facts, state, records and state behind the prompt, tokens, and what is left for landmarks."""
        inputs = self.num_needed * self.width
        with_state = [_NUM_FACTS, self.state_size, inputs, self.state_size] if self.state_size else [0] * 4
        return np.split(numbers, np.cumsum([self.num_recent * self.width, *with_state, capacity]))


@dataclass(slots=True)
class Records:
    """The records of one sequence, by the numbers of its rows."""

    layout: RecordLayout
    ring: Floats  # [num_recent, width]; memory is taken for those places alone that are in use
    marks: Floats  # [num_needed for each whole block of rows, width]
    token_ids: Any  # [capacity] int32 of its rows: what lies between landmarks can be computed again
    facts: Any  # [4] int32, of rows that are taken out: the first four numbers below; empty without a state
    state: Floats  # behind the absorbed rows; 0 numbers if no layer has one
    mark_states: Floats  # [whole blocks of rows, numbers of a state]
    prompt_records: Floats  # [num_needed, width] behind the prompt
    prompt_state: Floats
    num_places: int  # of the ring in use
    first: int = 0  # row from which on the ring holds all records
    num_absorbed: int = 0
    num_prompt: int = 0  # rows before the landmark behind the prompt; 0: there is none
    num_text: int = 0  # rows that are known to be text, which is rarely cut
    is_lost: bool = False  # a pass that failed may have changed what goes on behind landmarks

    def note(self, start: int, token_ids: Sequence[int]) -> None:
        """Take the tokens of new rows, whose records a pass is about to fill."""
        self.token_ids[start : start + len(token_ids)] = token_ids
        self.num_text = min(self.num_text, start)
        self.num_prompt = self.num_prompt if self.num_prompt <= start else 0

    def have_places(self, num_needed: int, start: int) -> None:
        """Have places for so many rows, or as many as possible; those before ``start`` that are held stay."""
        num_places = min(padded(num_needed, _FEW_PLACES), self.layout.num_recent)
        if num_places > self.num_places:
            rows = np.arange(self.first, start)
            self.ring[rows % num_places] = self.ring[self._places_of(rows)]
            self.num_places = num_places

    def make_way(self, num_rows: int) -> None:
        """Let a pass write the records of its rows, up to ``num_rows`` in all, over the oldest ones.

        Call it when all that the pass reads is known: it reads records before it writes over them.
        """
        self.first = max(self.first, num_rows - self.num_places)

    def holds(self, num_rows: int) -> bool:
        """Return whether a text can go on behind its first ``num_rows`` rows, without a landmark."""
        has_inputs = max(0, num_rows - self.layout.num_needed) >= self.first and not self.is_lost
        if not self.layout.state_size:
            return has_inputs
        has_records = self.first <= self.num_absorbed or num_rows == self.num_absorbed
        return has_inputs and has_records and self.num_absorbed <= num_rows

    def reach(self, num_rows: int) -> int:
        """Return behind how many of the first ``num_rows`` rows a text can go on."""
        if self.holds(num_rows):
            return num_rows
        most = min(num_rows, self.num_absorbed) if self.layout.state_size else num_rows
        whole = most // self.layout.block_rows * self.layout.block_rows
        return max(whole, self.num_prompt) if self.num_prompt <= most else whole

    def cut(self, num_rows: int) -> None:
        """Bring the records behind which a text of ``num_rows`` rows goes on back to the ring; see `reach`."""
        if not self.holds(num_rows):
            self.first = max(0, num_rows - self.layout.num_needed)
            rows = np.arange(self.first, num_rows)
            is_prompt = num_rows == self.num_prompt != 0
            self.ring[self._places_of(rows)] = (
                self.prompt_records[-len(rows) :] if is_prompt else self.marks[self._marks_of(rows)]
            )
            if self.layout.state_size and num_rows:
                block = num_rows // self.layout.block_rows - 1
                self.state[...] = self.prompt_state if is_prompt else self.mark_states[block]
            self.num_absorbed, self.is_lost = num_rows if self.layout.state_size else 0, False

    def move(self, rows: IntArray, first: int) -> None:
        """Make the records of ascending rows those of as many rows from ``first`` on."""
        new = np.arange(first, first + len(rows))
        self.token_ids[new] = self.token_ids[rows]
        self.ring[self._places_of(new)] = self.ring[self._places_of(rows)]
        marks = self._marks_of(new)
        self.marks[marks[marks >= 0]] = self.ring[self._places_of(new[marks >= 0])]

    def copy(self, source: Records, num_rows: int) -> None:
        """Take the records of the first rows of another sequence; see `reach`."""
        num_blocks = num_rows // self.layout.block_rows
        num_marks = num_blocks * self.layout.num_needed
        self.marks[:num_marks] = source.marks[:num_marks]
        self.mark_states[:num_blocks], self.state[...] = source.mark_states[:num_blocks], source.state
        self.num_absorbed, self.num_text, self.is_lost = source.num_absorbed, num_rows, source.is_lost
        self.prompt_records[...], self.prompt_state[...] = source.prompt_records, source.prompt_state
        self.num_prompt = source.num_prompt if source.num_prompt <= num_rows else 0
        self.token_ids[:num_rows] = source.token_ids[:num_rows]
        self.num_places, self.first = source.num_places, source.first
        self.ring[: self.num_places] = source.ring[: self.num_places]
        self.cut(num_rows)

    def save(self) -> None:
        """Write down, beside rows that are taken out, what belongs to them."""
        self.facts[...] = [self.num_places, self.first, self.num_absorbed, self.num_prompt][: len(self.facts)]

    def restore(self, num_rows: int) -> None:
        """Read what was written beside these rows."""
        self.first = max(0, num_rows - self.layout.num_needed)
        if len(self.facts):
            self.num_places, self.first, self.num_absorbed, self.num_prompt = self.facts.tolist()

    def mark_prompt(self, num_rows: int) -> None:
        """Note that a pass has written the state behind so many rows to where that behind the prompt belongs."""
        rows = np.arange(num_rows - self.layout.num_needed, num_rows)
        if rows[0] >= self.first:
            self.prompt_records[...] = self.ring[self._places_of(rows)]
            self.num_prompt = num_rows

    def mark_of(self, num_rows: int) -> int:
        """Return the address of the landmark's state behind so many rows; 0 if there is none."""
        block, is_inside = divmod(num_rows, self.layout.block_rows)
        if is_inside or not 0 < block <= len(self.mark_states):
            return 0
        return int(self.mark_states.ctypes.data + (block - 1) * self.mark_states.strides[0])

    def places(self, rows: IntArray, num_rows: int) -> tuple[IntArray, IntArray]:
        """Return the addresses where the records of new rows are kept, in the ring and as landmarks; 0 for nowhere."""
        marks = self._marks_of(rows)
        return (
            np.where(rows >= num_rows - self.num_places, self.addresses(rows), 0),
            np.where(marks >= 0, self.marks.ctypes.data + marks * self.marks.strides[0], 0),
        )

    def require_held(self, rows: IntArray) -> None:
        """Raise ModelError if the ring has lost the records of some rows that a pass is to read."""
        if len(rows) and (oldest := int(rows.min())) < self.first:
            raise ModelError(
                f"a token was given a parent whose record is gone: row {oldest}, of which those before row {self.first}"
                " have made way; run fewer candidates behind a text, or make the model's runner with more"
                " max_tree_rows"
            )

    def addresses(self, rows: IntArray) -> IntArray:
        """Return where the ring holds the records of rows."""
        found: IntArray = self.ring.ctypes.data + self._places_of(rows) * self.ring.strides[0]
        return found

    def _places_of(self, rows: IntArray) -> IntArray:
        """Return which places of the ring are those of rows."""
        places: IntArray = rows % self.num_places
        return places

    def _marks_of(self, rows: IntArray) -> IntArray:
        """Return which landmarks are those of rows; below 0 for none."""
        needed, block_rows = self.layout.num_needed, self.layout.block_rows
        places = rows % block_rows - (block_rows - needed)
        marks = rows // block_rows * needed + places
        found: IntArray = np.where((places >= 0) & (marks < len(self.marks)), marks, -1)
        return found
