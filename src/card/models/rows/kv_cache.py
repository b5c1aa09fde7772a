"""Row-wise KV caches: keys and values of each sequence in one array, beside the tree of its rows.

The arrays are NumPy's, or those of a layout that makes others of the same behaviour (`card.theirs.transformers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np

from card.errors import CapacityError, ModelError
from card.kernels.number_types import paged_zeros
from card.machine.memory import take_large_pages
from card.models.rows.records import RecordLayout, Records
from card.models.rows.row_tree import RowTree

# Memory of closed sequences that is kept for the next ones: new memory costs page faults, 15 to 30 ms for 64 MB. One
# buffer serves texts that come one after the other, whatever their lengths if a state is the largest part of it.
MAX_FREE_BYTES = 2**27
MAX_SLACK = 2  # a kept buffer serves a sequence that needs at least this part of it


class KVShape(NamedTuple):
    """A layer's part of a row: a key and a value of each head."""

    num_kv_heads: int
    head_size: int

    @property
    def num_elements(self) -> int:
        """Numbers of keys and values."""
        return 2 * self.num_kv_heads * self.head_size


_NO_LAYER = KVShape(1, 1)  # the shape of no layers at all


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of the cache: runs of layers of one shape, each an array [L, 2, Hkv, capacity, D], one after the other."""

    layers: tuple[KVShape, ...]  # that keep keys and values
    dtype: Any  # NumPy's, or that of another layout's arrays
    device: Any = "cpu"

    @property
    def row_elements(self) -> int:
        """Numbers in one row: keys and values of all layers and heads."""
        return sum(layer.num_elements for layer in self.layers)

    @property
    def places(self) -> list[int]:
        """Numbers of a row that lie before those of each layer."""
        return list(accumulate((layer.num_elements for layer in self.layers), initial=0))[:-1]

    @property
    def shape(self) -> KVShape:
        """The shape of all layers. Raises: ModelError if they have none in common."""
        if len(set(self.layers)) > 1:
            raise ModelError(
                f"the layers keep keys of {len(set(self.layers))} shapes, and rows are chosen where all have one;"
                " use a method that reads all rows"
            )
        return self.layers[0] if self.layers else _NO_LAYER

    def runs(self, buffer: Any, capacity: int) -> list[Any]:
        """Return the arrays of ``capacity`` rows at the start of a buffer."""
        arrays, first = list[Any](), 0
        for of, layers in groupby(self.layers):
            num_layers = len(list(layers))
            end = first + num_layers * capacity * of.num_elements
            arrays.append(buffer[first:end].reshape(num_layers, 2, of.num_kv_heads, capacity, of.head_size))
            first = end
        return arrays or [buffer[:0].reshape(0, 2, _NO_LAYER.num_kv_heads, capacity, _NO_LAYER.head_size)]

    def make(self, num_elements: int) -> Any:
        """Return an array of so many numbers, whatever they are. Raises: MemoryError, RuntimeError without room."""
        return paged_zeros(num_elements, self.dtype)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence: what its rows may see, and their keys and values."""

    tree: RowTree
    runs: list[Any]  # keys and values of all layers, see `KVLayout.runs`; the start of ``buffer``
    buffer: Any  # [capacity * row_elements or up to MAX_SLACK times as many], the records among them
    records: Records | None = None  # of a model that keeps some

    @property
    def kv(self) -> Any:
        """Keys and values [L, 2, Hkv, capacity, D] of a layout whose layers all have one shape."""
        (run,) = self.runs
        return run


class KVCache:
    """The sequences of one model, each with a buffer for as many rows as it asked for.

    Buffers of closed sequences are kept for later ones, up to ``max_free_bytes`` in all. A sequence gets the smallest
    kept buffer that is large enough and at most MAX_SLACK times as large as needed, else new memory. So the memory is
    at most ``max_free_bytes`` and MAX_SLACK times what the open sequences asked for.
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
        self.max_free_bytes = max_free_bytes
        self.row_bytes = layout.row_elements * layout.dtype.itemsize + (0 if records is None else records.row_bytes)
        self.state_bytes = 0 if records is None else records.ring_bytes  # of a sequence, besides its rows
        self._slots: dict[int, SequenceRows] = {}
        self._free: list[Any] = []  # buffers of closed sequences, the oldest first
        self._next_slot = 0

    @property
    def free_bytes(self) -> int:
        """Memory of the buffers that wait for another sequence."""
        return sum(int(buffer.nbytes) for buffer in self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers: of open sequences and free ones."""
        return sum(int(sequence.buffer.nbytes) for sequence in self._slots.values()) + self.free_bytes

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence with room for ``max_rows`` rows (None: as many as the cache allows).

        Returns: its slot, a number that no other sequence had or will have.
        Raises: CapacityError if ``max_rows`` is out of range or the device has no memory for it.
        """
        capacity = self.max_rows if max_rows is None else max_rows
        if not 1 <= capacity <= self.max_rows:
            raise CapacityError(f"a sequence has room for 1 to {self.max_rows} rows, got {capacity}")
        buffer = self._take_buffer(capacity)
        slot = self._next_slot
        self._next_slot += 1  # never used twice, so that a stale slot is caught
        self._slots[slot] = self._sequence(buffer, capacity)
        return slot

    def _num_elements(self, capacity: int) -> int:
        """Return the size of a buffer for so many rows."""
        return int((capacity * self.row_bytes + self.state_bytes) // self.layout.dtype.itemsize)

    def _sequence(self, buffer: Any, capacity: int) -> SequenceRows:
        """Return a sequence without rows, or with rows that a buffer holds but its tree does not know."""
        runs, size = self.layout.runs(buffer, capacity), capacity * self.layout.row_elements
        room = None if self._records is None else buffer[size : self._num_elements(capacity)]
        records = None if self._records is None else self._records.records(room, capacity)
        return SequenceRows(RowTree(capacity), runs, buffer, records)

    def _take_buffer(self, capacity: int) -> Any:
        num_elements = self._num_elements(capacity)
        fitting = [i for i, free in enumerate(self._free) if num_elements <= len(free) <= MAX_SLACK * num_elements]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        try:
            return self._make_buffer(capacity)
        except (MemoryError, RuntimeError):  # no memory, of the CPU or of a device
            self.drop_free()
        try:
            return self._make_buffer(capacity)
        except (MemoryError, RuntimeError) as error:
            num_bytes = num_elements * self.layout.dtype.itemsize
            raise CapacityError(
                f"{self.layout.device} has no memory for {num_bytes} bytes of KV rows; close other sequences, or"
                " allow fewer or shorter ones"
            ) from error

    def _make_buffer(self, capacity: int) -> Any:
        """Return a new buffer; a state and its records are in large pages, as a pass uses all of them."""
        buffer = self.layout.make(self._num_elements(capacity))
        if self._records is not None:
            room = buffer[capacity * self.layout.row_elements :]
            take_large_pages(room.ctypes.data, room.nbytes)
        return buffer

    def close(self, slot: int) -> None:
        """Drop a sequence; its memory may serve later ones. Raises: ModelError if the slot is not open."""
        self._free.append(self[slot].buffer)
        del self._slots[slot]
        while self.free_bytes > self.max_free_bytes:
            del self._free[0]

    def drop_free(self) -> None:
        """Give the memory of closed sequences back."""
        self._free.clear()

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first ``num_rows`` rows of ``source`` the rows of the empty sequence ``slot``, in one copy.

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
        target.tree.append(np.arange(-1, num_rows - 1))
        _copy(origin, target, num_rows)

    def read_rows(self, slot: int) -> Any:
        """Return a copy of the rows of a chain, as a buffer with just their room.

        Raises: ModelError if they are not a chain.
        """
        held = self[slot]
        if held.tree.num_prefix_rows != held.tree.num_rows:
            raise ModelError(f"slot {slot} holds a tree of rows; drop its candidates with keep()")
        num_rows = held.tree.num_rows
        rows = self.layout.make(self._num_elements(num_rows))
        taken = self._sequence(rows, num_rows)
        _copy(held, taken, num_rows)
        if taken.records is not None:
            taken.records.save()
        return rows

    def write_rows(self, slot: int, rows: Any) -> None:
        """Fill an empty sequence with rows that `read_rows` gave.

        Raises: ModelError if it is not empty; CapacityError if they do not fit.
        """
        target, num_rows = self[slot], (rows.nbytes - self.state_bytes) // self.row_bytes
        if target.tree.num_rows:
            raise ModelError(f"slot {slot} holds {target.tree.num_rows} rows; rows are put into an empty one only")
        target.tree.append(np.arange(-1, num_rows - 1))
        source = self._sequence(rows, num_rows)
        if source.records is not None:
            source.records.restore(num_rows)
        _copy(source, target, num_rows)

    def read_part(self, slot: int, first: int, end: int) -> Any:
        """Return a copy of some rows of a chain, of a cache without records: that of `KVLayout.runs` for these alone.

        Raises: ModelError if the rows are no chain, or the slot is not open.
        """
        held = self[slot]
        if not 0 <= first < end <= held.tree.num_prefix_rows:
            raise ModelError(
                f"rows {first} to {end} of slot {slot} were to be read; its first {held.tree.num_prefix_rows} rows are"
                " a chain"
            )
        rows = self.layout.make((end - first) * self.layout.row_elements)
        for one, other in zip(held.runs, self.layout.runs(rows, end - first), strict=True):
            other[...] = one[:, :, :, first:end]
        return rows

    def append_part(self, slot: int, rows: Any, num_rows: int) -> None:
        """Put the first ``num_rows`` rows of what `read_part` gave behind the chain that a sequence holds.

        Raises: CapacityError if they do not fit; nothing has changed then.
        """
        target, num_read = self[slot], rows.nbytes // self.row_bytes
        first = target.tree.num_rows
        target.tree.append(np.arange(first - 1, first + num_rows - 1))
        for one, other in zip(self.layout.runs(rows, num_read), target.runs, strict=True):
            other[:, :, :, first : first + num_rows] = one[:, :, :, :num_rows]

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
        kept = np.asarray(rows, np.int64)
        num_still = int((kept == np.arange(num_prefix_rows, num_prefix_rows + len(kept))).sum())  # a leading run
        if sequence.records is not None and (kept[num_still:] < sequence.records.first).any():
            raise ModelError(
                f"asked to move rows {kept.tolist()}, and the states behind rows below {sequence.records.first} are"
                " gone; run fewer candidates in a pass, or make the model's runner with more max_tree_rows"
            )
        sequence.tree.keep(num_prefix_rows, kept)
        if num_still < len(kept):
            first = num_prefix_rows + num_still
            for run in sequence.runs:
                run[:, :, :, first : first + len(kept) - num_still] = run[:, :, :, kept[num_still:]]
            if sequence.records is not None:
                sequence.records.move(kept[num_still:], first)


def _copy(source: SequenceRows, target: SequenceRows, num_rows: int) -> None:
    """Copy the first rows of all layers, and the records behind which a text goes on."""
    for one, other in zip(source.runs, target.runs, strict=True):
        other[:, :, :, :num_rows] = one[:, :, :, :num_rows]
    if target.records is not None and source.records is not None:
        target.records.copy(source.records, num_rows)
