"""Row-wise KV caches: keys and values of each sequence in blocks, beside the tree of its rows.

Sequences that begin alike share blocks. A block of several is never written to: who would write to it first makes one
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from card.errors import CapacityError, ModelError
from card.machine.memory import take_large_pages
from card.models.rows.blocks import Block, Blocks, FreeBuffers
from card.models.rows.kv_layout import KVLayout
from card.models.rows.parts import RowsPart
from card.models.rows.records import RecordLayout, Records
from card.models.rows.row_tree import IntArray, RowTree

# Memory of closed sequences that is kept for the next ones: new memory costs page faults, 15 to 30 ms for 64 MB.
MAX_FREE_BYTES = 2**27


class _Span(NamedTuple):
    """Rows of one block: their arrays, their places there, and their places among all rows that are asked for."""

    runs: list[Any]
    inside: slice
    outside: slice


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence: what its rows may see, and their keys and values."""

    tree: RowTree
    block_rows: int
    blocks: list[Block]  # those of its rows, and some behind them
    places: IntArray  # [most blocks] addresses of the blocks, as machine code reads them
    numbers: IntArray  # [most blocks] of the blocks
    room: Any = None  # memory of the records
    records: Records | None = None  # of a model that keeps some

    @property
    def kv(self) -> Any:
        """Keys and values [L, 2, Hkv, capacity, D] of one block whose layers all have one shape."""
        (block,) = self.blocks
        (run,) = block.runs
        return run

    def put(self, idx: int, block: Block) -> None:
        """Make a block the one of this number, in place of another or behind all."""
        self.blocks[idx : idx + 1] = [block]
        self.places[idx], self.numbers[idx] = block.address, block.number

    def spans(self, first: int, end: int) -> Iterator[_Span]:
        """Yield where rows ``first`` to ``end`` lie."""
        for start in range(first // self.block_rows * self.block_rows, end, self.block_rows):
            low, high = max(first, start), min(end, start + self.block_rows)
            runs = self.blocks[start // self.block_rows].runs
            yield _Span(runs, slice(low - start, high - start), slice(low - first, high - first))

    def read(self, first: int, end: int, out: list[Any]) -> None:
        """Copy rows to arrays as of `KVLayout.runs`."""
        for span in self.spans(first, end):
            for run, to in zip(span.runs, out, strict=True):
                to[:, :, :, span.outside] = run[:, :, :, span.inside]

    def write(self, first: int, end: int, rows: list[Any]) -> None:
        """Copy rows from such arrays, to blocks of its own."""
        for span in self.spans(first, end):
            for run, source in zip(span.runs, rows, strict=True):
                run[:, :, :, span.inside] = source[:, :, :, span.outside]


class KVCache:
    """The sequences of one model, each with room for as many rows as it asked for.

    A block takes memory when its first row is added. Buffers of closed sequences are kept for later ones, up to
    ``max_free_bytes`` in all.
    """

    def __init__(
        self,
        layout: KVLayout,
        max_rows: int,
        *,
        records: RecordLayout | None = None,
        max_free_bytes: int = MAX_FREE_BYTES,
    ) -> None:
        self.layout, self._records = layout, records
        self.max_rows = max_rows
        self._kv_bytes = layout.row_elements * layout.dtype.itemsize  # of a row without its records
        self.row_bytes = self._kv_bytes + (0 if records is None else records.row_bytes)
        self.state_bytes = 0 if records is None else records.ring_bytes  # of a sequence, besides its rows
        self._slots: dict[int, SequenceRows] = {}
        self._free = FreeBuffers(layout, max_free_bytes)
        self._blocks = Blocks(layout, self._free)
        self._landmarks = None if records is None else records.landmarks(self._free, layout.dtype.itemsize)
        self._next_slot = 0

    @property
    def free_bytes(self) -> int:
        """Memory of the buffers that wait for another sequence."""
        return self._free.num_bytes

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers: of open sequences and free ones."""
        rooms = sum(int(sequence.room.nbytes) for sequence in self._slots.values() if sequence.room is not None)
        landmarks = 0 if self._landmarks is None else self._landmarks.num_bytes
        return self._blocks.num_bytes + rooms + landmarks + self._free.num_bytes

    def held_bytes(self, slots: Sequence[int]) -> int:
        """Return the memory of some sequences, with room for all rows that they asked for; what they share counts once.

        Raises: ModelError if one is not open.
        """
        held = [self[slot] for slot in slots]
        num_rows = self._blocks.num_rows([one.numbers[: len(one.blocks)] for one in held])
        num_rows += sum(max(0, one.tree.max_rows - len(one.blocks) * one.block_rows) for one in held)
        of_records = (self.row_bytes - self._kv_bytes) * sum(one.tree.max_rows for one in held)
        if self._records is not None:
            marks = [mark for one in held if one.records is not None for mark in one.records.held]
            of_records -= (len(marks) - len(set(marks))) * self._records.mark_bytes
        return int(num_rows * self._kv_bytes + of_records + len(held) * self.state_bytes)

    def shared_bytes(self, num_rows: int) -> int:
        """Return the memory that a copy of the first rows of a sequence does not take, as both share it."""
        block_rows = self.layout.block_rows
        kv_bytes = 0 if block_rows is None else num_rows // block_rows * block_rows * self._kv_bytes
        return kv_bytes + (0 if self._records is None else self._records.shared_bytes(num_rows))

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence with room for ``max_rows`` rows (None: as many as the cache allows).

        Returns: its slot, a number that no other sequence had or will have.
        Raises: CapacityError if ``max_rows`` is out of range or the device has no memory for it.
        """
        capacity = self.max_rows if max_rows is None else max_rows
        if not 1 <= capacity <= self.max_rows:
            raise CapacityError(f"a sequence has room for 1 to {self.max_rows} rows, got {capacity}")
        sequence = self._sequence(capacity)
        if self.layout.block_rows is None:
            self._add_block(sequence)
        slot = self._next_slot
        self._next_slot += 1  # never used twice, so that a stale slot is caught
        self._slots[slot] = sequence
        return slot

    def _sequence(self, capacity: int) -> SequenceRows:
        """Return a sequence without rows and blocks."""
        block_rows = self.layout.block_rows or capacity
        places, numbers = np.zeros((2, -(-capacity // block_rows)), np.int64)
        tree, layout = RowTree(capacity), self._records
        if layout is None:
            return SequenceRows(tree, block_rows, [], places, numbers)
        num_elements = layout.own_bytes(capacity) // self.layout.dtype.itemsize
        room = self._free.take(num_elements)
        take_large_pages(room.ctypes.data, room.nbytes)  # a pass uses all of a state and its records
        records = layout.records(room[:num_elements], capacity, self._landmarks)
        return SequenceRows(tree, block_rows, [], places, numbers, room, records)

    def _record_elements(self, capacity: int) -> int:
        """Return the size of the records of so many rows that are taken out, in numbers of the rows' type."""
        num_bytes = capacity * (self.row_bytes - self._kv_bytes) + self.state_bytes
        return int(num_bytes // self.layout.dtype.itemsize)

    def close(self, slot: int) -> None:
        """Drop a sequence; its memory may serve later ones. Raises: ModelError if the slot is not open."""
        sequence = self[slot]
        del self._slots[slot]
        self._drop_blocks(sequence)
        if sequence.records is not None:
            sequence.records.release()
            self._free.give(sequence.room)

    def drop_free(self) -> None:
        """Give the memory of closed sequences back."""
        self._free.clear()

    def make_room(self, slot: int, first: int) -> None:
        """Have memory for rows from ``first`` on that no other sequence reads.

        Raises: CapacityError if the device has none. The rows before are as they were then.
        """
        sequence = self[slot]
        self._own(sequence, first, sequence.tree.num_rows)
        if sequence.records is not None:
            sequence.records.have_landmarks(first, sequence.tree.num_rows)

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first ``num_rows`` rows of ``source`` the rows of the empty sequence ``slot``.

        They share whole blocks and landmarks; the rows behind these are copied.

        Raises: ModelError if they are no chain in ``source``, ``slot`` is not empty or one of the two is not open;
            CapacityError if ``slot`` has no room for them. Nothing has changed then.
        """
        origin, target = self[source], self[slot]
        if target.tree.num_rows:
            raise ModelError(f"slot {slot} holds {target.tree.num_rows} rows; rows are copied into an empty one only")
        if not 0 <= num_rows <= origin.tree.num_prefix_rows:
            raise ModelError(
                f"the first {num_rows} rows of slot {source} were to be copied; 0 to {origin.tree.num_prefix_rows} of"
                f" its {origin.tree.num_rows} rows are a chain"
            )
        block_rows = self.layout.block_rows or num_rows + 1
        first = num_rows // block_rows * block_rows
        try:
            self._share(origin, target, first)
            self._append(target, num_rows - first)
            if target.records is not None and origin.records is not None:
                target.records.copy(origin.records, num_rows)
        except CapacityError:
            target.tree.truncate(0)
            raise
        for span in origin.spans(first, num_rows):
            target.write(first, num_rows, [run[:, :, :, span.inside] for run in span.runs])

    def read_rows(self, slot: int) -> Any:
        """Return a copy of the rows of a chain, as a buffer with just their room.

        Raises: ModelError if they are not a chain.
        """
        held = self[slot]
        if held.tree.num_prefix_rows != held.tree.num_rows:
            raise ModelError(f"slot {slot} holds a tree of rows; drop its candidates with keep()")
        num_rows = held.tree.num_rows
        size = num_rows * self.layout.row_elements
        rows = self.layout.make(size + self._record_elements(num_rows))
        held.read(0, num_rows, self.layout.runs(rows, num_rows))
        if held.records is not None:
            taken = held.records.layout.records(rows[size:], num_rows)
            taken.copy(held.records, num_rows)
            taken.save()
        return rows

    def write_rows(self, slot: int, rows: Any) -> None:
        """Fill an empty sequence with rows that `read_rows` gave.

        Raises: ModelError if it is not empty; CapacityError if they do not fit.
        """
        target, num_rows = self[slot], (rows.nbytes - self.state_bytes) // self.row_bytes
        if target.tree.num_rows:
            raise ModelError(f"slot {slot} holds {target.tree.num_rows} rows; rows are put into an empty one only")
        self._append(target, num_rows)
        target.write(0, num_rows, self.layout.runs(rows, num_rows))
        if target.records is not None:
            written = target.records.layout.records(rows[num_rows * self.layout.row_elements :], num_rows)
            written.restore(num_rows)
            target.records.copy(written, num_rows)

    def part_bytes(self, part: RowsPart) -> int:
        """Return the size of what `read_part` gives."""
        of_records = 0 if self._records is None else self._records.part_bytes(part)
        return int((part.end - part.first) * self._kv_bytes + of_records)

    def read_part(self, slot: int, part: RowsPart) -> Any:
        """Return a copy of some rows of a chain, uint8: that of `KVLayout.runs` for these alone, and their records.

        Raises: ModelError if the rows are no chain, or the slot is not open, or the text has nothing to go on from.
        """
        held, (first, end, _) = self[slot], part
        if not 0 <= first < end <= held.tree.num_prefix_rows:
            raise ModelError(
                f"rows {first} to {end} of slot {slot} were to be read; its first {held.tree.num_prefix_rows} rows are"
                " a chain"
            )
        rows = self.layout.make((end - first) * self.layout.row_elements)
        held.read(first, end, self.layout.runs(rows, end - first))
        of_records = [] if held.records is None else held.records.read_part(part)
        return (
            np.concatenate([one.view(np.uint8) for one in (rows, *of_records)]) if of_records else rows.view(np.uint8)
        )

    def append_part(self, slot: int, part: RowsPart, taken: Any, num_rows: int) -> None:
        """Put the first ``num_rows`` rows of what `read_part` gave behind the chain that a sequence holds.

        Raises: CapacityError if they do not fit.
        """
        target, num_read = self[slot], part.end - part.first
        self._append(target, num_rows)
        rows = taken[: num_read * self._kv_bytes].view(self.layout.dtype)
        target.write(part.first, part.first + num_rows, self.layout.runs(rows, num_read))
        if target.records is not None:
            target.records.append_part(part, taken[num_read * self._kv_bytes :].view(np.int32), num_rows)

    def _append(self, sequence: SequenceRows, num_rows: int) -> None:
        """Add rows to a chain, and memory for them. Raises: CapacityError; nothing has changed then."""
        first = sequence.tree.num_rows
        sequence.tree.append(np.arange(first - 1, first + num_rows - 1))
        try:
            self._own(sequence, first, first + num_rows)
        except CapacityError:
            sequence.tree.truncate(first)
            raise

    def __getitem__(self, slot: int) -> SequenceRows:
        """Return the sequence in ``slot``. Raises: ModelError if it is not open."""
        try:
            return self._slots[slot]
        except KeyError:
            raise ModelError(f"slot {slot} is not open; open slots: {sorted(self._slots)}") from None

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep rows 0 .. num_prefix_rows - 1 and then ``rows``, in this order; drop the rest.

        Rows that stay where they are are not copied; the others move in one gather and one write for all layers alike.
        Raises: ModelError if rows do not exist or ascend, or a kept row's parent is not kept; nothing changed then.
        """
        sequence = self[slot]
        num_kept = num_prefix_rows + len(rows)
        stay = num_prefix_rows >= 0 and num_kept <= sequence.tree.num_rows
        if stay and all(row == num_prefix_rows + i for i, row in enumerate(rows)):
            sequence.tree.truncate(num_kept)
            if sequence.records is not None:
                sequence.records.cut(num_kept)
            return
        chosen = np.asarray(rows, np.int64)
        num_still = int((chosen == np.arange(num_prefix_rows, num_prefix_rows + len(chosen))).sum())  # a leading run
        if sequence.records is not None and (chosen[num_still:] < sequence.records.first).any():
            raise ModelError(
                f"asked to move rows {chosen.tolist()}, and the states behind rows below {sequence.records.first} are"
                " gone; run fewer candidates in a pass, or make the model's runner with more max_tree_rows"
            )
        sequence.tree.keep(num_prefix_rows, chosen)
        if num_still < len(chosen):
            self._move(sequence, chosen[num_still:], num_prefix_rows + num_still)
            if sequence.records is not None:
                sequence.records.move(chosen[num_still:], num_prefix_rows + num_still)

    def _move(self, sequence: SequenceRows, rows: IntArray, first: int) -> None:
        """Copy ascending rows to as many places from ``first`` on, which none of them is before."""
        size, new = sequence.block_rows, np.arange(first, first + len(rows))
        is_cut = (np.diff(rows // size) != 0) | (np.diff(new // size) != 0)
        self._own(sequence, first, first + len(rows))
        for part in np.split(np.arange(len(rows)), np.flatnonzero(is_cut) + 1):  # of one block each
            source, place = sequence.blocks[rows[part[0]] // size], new[part[0]]
            (target,) = sequence.spans(place, place + len(part))
            for run, to in zip(source.runs, target.runs, strict=True):
                to[:, :, :, target.inside] = run[:, :, :, rows[part] % size]

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def _share(self, origin: SequenceRows, target: SequenceRows, num_rows: int) -> None:
        """Let whole blocks of another sequence be the rows of an empty one. Raises: CapacityError if it is full."""
        target.tree.append(np.arange(-1, num_rows - 1))
        self._drop_blocks(target)
        for idx in range(num_rows // target.block_rows):
            origin.blocks[idx].num_users += 1
            target.put(idx, origin.blocks[idx])

    def _own(self, sequence: SequenceRows, first: int, end: int) -> None:
        """Have blocks of a sequence's own for rows ``first`` to ``end``; of those shared so far, copies."""
        size = sequence.block_rows
        for idx in range(first // size, -(-end // size)):
            if idx == len(sequence.blocks):
                self._add_block(sequence)
            elif (shared := sequence.blocks[idx]).num_users > 1:
                sequence.put(idx, self._new_block(size, idx))
                for run, to in zip(shared.runs, sequence.blocks[idx].runs, strict=True):
                    to[...] = run
                self._blocks.release(shared)

    def _add_block(self, sequence: SequenceRows) -> None:
        idx = len(sequence.blocks)
        sequence.put(idx, self._new_block(sequence.block_rows, idx))

    def _new_block(self, size: int, idx: int) -> Block:
        """Return a block of ``size`` rows for the rows from ``size * idx`` on. Raises: CapacityError without memory."""
        return self._blocks.make(size, min(size, self.max_rows - size * idx))

    def _drop_blocks(self, sequence: SequenceRows) -> None:
        while sequence.blocks:
            self._blocks.release(sequence.blocks.pop())
