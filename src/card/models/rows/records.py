"""Records of rows: what layers that sum up a text have taken in of its last rows, and of some rows long ago.

A row's layers without attention need the records of its last ancestors alone. So the cache holds those of the newest
rows, in a ring, and *landmarks*: those of the last rows of each block of 32, behind which a text can be cut and go on.
A row that is dropped has changed nothing, so candidates may be trees, and a rejection costs nothing.

Some layers keep states that depend on all rows before. Those of the first rows of a text are *absorbed*: the sequence
has one state behind these, and rows behind them go on from it by their records. Landmarks hold the state there, too.
They are further apart, and one more stands behind the prompt, which is what the next text shares most often. As their
records are large, the ring begins with few places, and gets more when more rows are in doubt.

Sequences that begin alike share landmarks, until one of them writes there. A ring and a state are a sequence's own:
each of its passes writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import Floats
from card.kernels.packed_linear import padded
from card.models.rows.blocks import FreeBuffers
from card.models.rows.landmarks import Landmark, Landmarks
from card.models.rows.parts import RowsPart
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

    def landmarks(self, free: FreeBuffers, itemsize: int) -> Landmarks:
        """Return what makes landmarks in memory of ``free``, whose numbers have so many bytes."""
        sizes = {"width": self.width, "num_needed": self.num_needed, "state_size": self.state_size}
        return Landmarks(free, itemsize, **sizes)

    def shared_bytes(self, num_rows: int) -> int:
        """Return the memory of landmarks that a copy of the first rows shares; that of a last state may be to come."""
        return max(0, num_rows // self.block_rows - bool(self.state_size)) * self.mark_bytes

    def part_bytes(self, part: RowsPart) -> int:
        """Return the size of what belongs to some rows of a text in files: tokens, and landmarks, see `read_part`."""
        num_marks = part.end // self.block_rows - part.first // self.block_rows + part.ends_text
        return 4 * (part.end - part.first) + num_marks * self.mark_bytes

    def own_bytes(self, capacity: int) -> int:
        """Return the memory of a sequence's records besides landmarks."""
        with_state = _NUM_FACTS + self.state_size if self.state_size else 0
        return 4 * (self.num_recent * self.width + with_state + capacity)

    def records(self, room: Any, capacity: int, landmarks: Landmarks | None = None) -> Records:
        """Return the records of ``capacity`` rows that lie in a room of bytes; none of them is filled.

        Args:
            landmarks: gives landmarks as they are needed; None: they all lie in the room, behind the rest.
        """
        numbers = room.view(np.int32)
        facts = [_NUM_FACTS, self.state_size] if self.state_size else [0, 0]
        ends = np.cumsum([self.num_recent * self.width, *facts, capacity])
        ring, facts_area, state, token_ids, rest = np.split(numbers, ends)
        marks: list[Landmark | None] = [None] * (capacity // self.block_rows + 1)
        if landmarks is None:
            size, floats = self._mark_size, rest.view(np.float32)
            for idx in range(len(marks) if self.state_size else len(marks) - 1):
                marks[idx] = Landmark(floats[idx * size : (idx + 1) * size], self.width, self.num_needed)
        return Records(
            self,
            ring.view(np.float32).reshape(self.num_recent, self.width),
            token_ids,
            facts_area,
            state.view(np.float32),
            landmarks,
            min(_FEW_PLACES, self.num_recent) if self.state_size else self.num_recent,
            marks=marks[:-1],
            prompt=marks[-1],
        )


@dataclass(slots=True)
class Records:
    """The records of one sequence, by the numbers of its rows."""

    layout: RecordLayout
    ring: Floats  # [num_recent, width]; memory is taken for those places alone that are in use
    token_ids: Any  # [capacity] int32 of its rows: what lies between landmarks can be computed again
    facts: Any  # [4] int32, of rows that are taken out: the first four numbers below; empty without a state
    state: Floats  # behind the absorbed rows; 0 numbers if no layer has one
    landmarks: Landmarks | None  # None: rows that are taken out, whose landmarks nobody shares
    num_places: int  # of the ring in use
    first: int = 0  # row from which on the ring holds all records
    num_absorbed: int = 0
    num_prompt: int = 0  # rows before the landmark behind the prompt; 0: there is none
    num_text: int = 0  # rows that are known to be text, which is rarely cut
    is_lost: bool = False  # a pass that failed may have changed what goes on behind landmarks
    marks: list[Landmark | None] = field(default_factory=list)  # behind each whole block of rows, as far as it has them
    prompt: Landmark | None = None

    @property
    def held(self) -> Iterator[Landmark]:
        """The landmarks that it has."""
        return (mark for mark in (*self.marks, self.prompt) if mark is not None)

    def release(self) -> None:
        """Give up all landmarks."""
        assert self.landmarks is not None
        for mark in self.held:
            self.landmarks.release(mark)
        self.marks, self.prompt, self.num_prompt = [None] * len(self.marks), None, 0

    def have_landmarks(self, first: int, end: int) -> None:
        """Have landmarks of its own wherever rows ``first`` to ``end`` belong to some. Raises: CapacityError."""
        assert self.landmarks is not None
        size, needed = self.layout.block_rows, self.layout.num_needed
        low = min(first, self.num_absorbed) if self.layout.state_size else first
        for idx in range(low // size, min((end + needed - 1) // size, len(self.marks))):
            shared = self.marks[idx]
            if shared is None or shared.num_users > 1:
                mark = self.landmarks.make()
                if shared is not None:
                    mark.numbers[...] = shared.numbers
                    self.landmarks.release(shared)
                self.marks[idx] = mark

    def begin_prompt(self) -> int:
        """Return the address of the state behind a new prompt, whose landmark takes the place of an older one's.

        Raises: CapacityError.
        """
        assert self.landmarks is not None
        self.num_prompt = 0
        if self.prompt is None or self.prompt.num_users > 1:
            new, old = self.landmarks.make(), self.prompt
            if old is not None:
                self.landmarks.release(old)
            self.prompt = new
        return self.prompt.state_address

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
            is_prompt = num_rows == self.num_prompt
            self._go_on_from(self.prompt if is_prompt else self.marks[num_rows // self.layout.block_rows - 1], num_rows)

    def _go_on_from(self, mark: Landmark | None, num_rows: int) -> None:
        self.first = max(0, num_rows - self.layout.num_needed)
        if num_rows:
            assert mark is not None, "rows behind which no text goes on"
            rows = np.arange(self.first, num_rows)
            self.ring[self._places_of(rows)] = mark.records[-len(rows) :]
            self.state[...] = mark.state
        self.num_absorbed, self.is_lost = num_rows if self.layout.state_size else 0, False

    def _mark_last(self, num_rows: int) -> None:
        """Put the records of the last rows where a landmark begins that later rows will fill. Raises: CapacityError."""
        rows = np.arange(max(self.first, num_rows // self.layout.block_rows * self.layout.block_rows), num_rows)
        if self.landmarks is not None and len(rows):
            self.have_landmarks(num_rows, num_rows)
            for row, mark, idx in self._marked(rows):
                mark.records[idx] = self.ring[self._places_of(rows[row])]

    def move(self, rows: IntArray, first: int) -> None:
        """Make the records of ascending rows those of as many rows from ``first`` on. Raises: CapacityError."""
        new = np.arange(first, first + len(rows))
        self.have_landmarks(first, first + len(rows))
        self.token_ids[new] = self.token_ids[rows]
        self.ring[self._places_of(new)] = self.ring[self._places_of(rows)]
        for row, mark, idx in self._marked(new):
            mark.records[idx] = self.ring[self._places_of(new[row])]

    def copy(self, source: Records, num_rows: int) -> None:
        """Take the records of the first rows of another sequence; see `reach`. Raises: CapacityError."""
        self._take_marks(source, num_rows)
        self.token_ids[:num_rows] = source.token_ids[:num_rows]
        self.num_text, self.num_absorbed, self.is_lost = num_rows, source.num_absorbed, True
        if source.holds(num_rows):
            self.num_places, self.first, self.is_lost = source.num_places, source.first, False
            self.ring[: self.num_places] = source.ring[: self.num_places]
            self.state[...] = source.state
        self.cut(num_rows)
        self._mark_last(num_rows)

    def _take_marks(self, source: Records, num_rows: int) -> None:
        """Share landmarks of the first rows of another sequence; copy those whose state it has yet to write."""
        if self.landmarks is not None:
            self.release()
        size, is_shared = self.layout.block_rows, self.landmarks is not None and source.landmarks is not None
        for idx, mark in enumerate(source.marks[: num_rows // size]):
            if mark is None:
                continue
            is_whole = not self.layout.state_size or (idx + 1) * size <= source.num_absorbed
            self.marks[idx] = self._taken(self.marks[idx], mark, is_shared=is_shared and is_whole)
        if source.prompt is not None and 0 < source.num_prompt <= num_rows:
            self.prompt = self._taken(self.prompt, source.prompt, is_shared=is_shared)
            self.num_prompt = source.num_prompt

    def _taken(self, copy: Landmark | None, mark: Landmark, *, is_shared: bool) -> Landmark:
        """Return a landmark as it is, with a user more, or what it holds in one's own."""
        if is_shared:
            mark.num_users += 1
            return mark
        if copy is None:
            assert self.landmarks is not None
            copy = self.landmarks.make()
        copy.numbers[...] = mark.numbers
        return copy

    def separable(self, num_rows: int) -> int:
        """Return behind how many of the first ``num_rows`` rows it has what a text goes on from, all by itself."""
        most = min(num_rows, self.num_absorbed) if self.layout.state_size else num_rows
        return most if self.holds(most) else self.reach(most)

    def read_part(self, part: RowsPart) -> list[Any]:
        """Return what belongs to some rows in files: their tokens, their landmarks, and at the end of a text one more.

        Raises: ModelError if it is not there, or not yet.
        """
        size = self.layout.block_rows
        marks = self.marks[part.first // size : part.end // size]
        is_behind = self.layout.state_size and part.end // size * size > self.num_absorbed
        if None in marks or (marks and is_behind) or (part.ends_text and self.separable(part.end) < part.end):
            raise ModelError(f"what a text goes on from behind row {part.end} or before is not there")
        taken = [self.token_ids[part.first : part.end], *(mark.numbers for mark in marks if mark is not None)]
        if not part.ends_text:
            return taken
        if self.holds(part.end):
            rows = np.arange(max(0, part.end - self.layout.num_needed), part.end)
            inputs = np.zeros((self.layout.num_needed, self.layout.width), np.float32)
            inputs[-len(rows) :] = self.ring[self._places_of(rows)]
            return [*taken, inputs.ravel(), self.state]
        mark = self.prompt if part.end == self.num_prompt else self.marks[part.end // size - 1]
        assert mark is not None
        return [*taken, mark.numbers]

    def append_part(self, part: RowsPart, numbers: Any, num_rows: int) -> None:
        """Take what `read_part` gave, int32, for the first ``num_rows`` of its rows. Raises: CapacityError.

        What a text goes on from is made again from a landmark, unless these rows end at one.
        """
        end, num_read, size = part.first + num_rows, part.end - part.first, self.layout.block_rows
        self.have_landmarks(part.first, end)
        self.token_ids[part.first : end] = numbers[:num_rows]
        given = numbers[num_read:].view(np.float32).reshape(-1, self.layout.mark_bytes // 4)
        for idx in range(part.first // size, end // size):
            mark = self.marks[idx]
            assert mark is not None
            mark.numbers[...] = given[idx - part.first // size]
        self.first, self.num_text, self.is_lost = end, end, True
        self.num_absorbed = end if self.layout.state_size else 0
        if part.ends_text and num_rows == num_read:
            last = Landmark(given[-1], self.layout.width, self.layout.num_needed)
            self._go_on_from(last, end)
            if self.layout.state_size:
                self.begin_prompt()
                assert self.prompt is not None
                self.prompt.numbers[...] = last.numbers
                self.num_prompt = end
            self._mark_last(end)
        elif end % size == 0:
            self.cut(end)

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
        if rows[0] >= self.first and self.prompt is not None:
            self.prompt.records[...] = self.ring[self._places_of(rows)]
            self.num_prompt = num_rows

    def mark_of(self, num_rows: int) -> int:
        """Return the address of the landmark's state behind so many rows; 0 if there is none."""
        block, is_inside = divmod(num_rows, self.layout.block_rows)
        mark = None if is_inside or not 0 < block <= len(self.marks) else self.marks[block - 1]
        return 0 if mark is None else mark.state_address

    def places(self, rows: IntArray, num_rows: int) -> tuple[IntArray, IntArray]:
        """Return the addresses where the records of new rows are kept, in the ring and as landmarks; 0 for nowhere."""
        marks = np.zeros(len(rows), np.int64)
        for row, mark, idx in self._marked(rows):
            marks[row] = mark.address + idx * mark.records.strides[0]
        return np.where(rows >= num_rows - self.num_places, self.addresses(rows), 0), marks

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

    def _marked(self, rows: IntArray) -> Iterator[tuple[int, Landmark, int]]:
        """Yield which of some rows belong to landmarks: their places among these, the landmarks, and places there."""
        needed, size = self.layout.num_needed, self.layout.block_rows
        for row in np.flatnonzero(rows % size >= size - needed).tolist():
            block, place = divmod(int(rows[row]), size)
            if block < len(self.marks) and (mark := self.marks[block]) is not None:
                yield row, mark, place - (size - needed)
