"""Rows of a sequence as a tree: their parents and positions, and what each may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from card.errors import CapacityError, ModelError
from card.models.protocol import NO_PARENT

BIAS_ALIGNMENT = 8  # CUDA attention kernels copy a mask whose rows do not start at multiples of this

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention within chunks of positions: a row sees those of its ancestors that share its chunk."""

    size: int  # positions


Window = int | Chunk | None
"""Reach of a layer: a sliding window in positions, chunks, or all ancestors."""


class RowTree:
    """Parents, positions and ancestors of the rows of one sequence.

    Rows 0 .. num_prefix_rows - 1 are a chain and need no matrix: each sees all rows up to itself. A later row (a tree
    row) sees the first ``_num_visible`` rows of that chain, and the tree rows that ``_ancestors`` names.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.num_rows = 0
        self.num_prefix_rows = 0
        self._parents = np.empty(max_rows, np.int64)
        self._positions = np.empty(max_rows, np.int64)
        self._num_visible = np.empty(max_rows, np.int64)  # of tree rows only
        self._ancestors: BoolArray = np.zeros((0, 0), np.bool_)  # [tree row, tree row], itself included; grows

    def positions(self, start: int = 0) -> IntArray:
        """Return the positions (numbers of ancestors) of rows ``start`` .. num_rows - 1, as a view."""
        return self._positions[start : self.num_rows]

    @property
    def parents(self) -> IntArray:
        """The parents of all rows, as a view."""
        return self._parents[: self.num_rows]

    def ancestors(self, start: int, count: int) -> IntArray:
        """Return the last ancestors of the rows from ``start`` on, [T, count]: the oldest first, NO_PARENT for none."""
        ancestors = np.full((self.num_rows - start, count), NO_PARENT)
        rows = np.arange(start, self.num_rows)
        for place in reversed(range(count)):
            rows = np.where(rows == NO_PARENT, NO_PARENT, self._parents[rows])
            ancestors[:, place] = rows
        return ancestors

    def furthest(self, start: int) -> int:
        """Return the largest position of rows ``start`` .. num_rows - 1."""
        is_chain = self.num_prefix_rows == self.num_rows
        return self.num_rows - 1 if is_chain else int(self.positions(start).max())

    def append(self, parents: Sequence[int] | IntArray) -> None:
        """Add a row for each parent, [T]. Nothing changes when it raises.

        Raises: CapacityError if the rows do not fit; ModelError if a parent is not an earlier row.
        """
        start, stop = self.num_rows, self.num_rows + len(parents)
        if stop > self.max_rows:
            raise CapacityError(
                f"the sequence holds {start} rows and {len(parents)} more were asked for; at most {self.max_rows} fit:"
                " drop rows with keep(), or open it with room for more"
            )
        if self.num_prefix_rows == start and list(parents) == list(range(start - 1, stop - 1)):
            self._append_chain(stop)  # as for nearly every token: few arrays
            return
        given, previous = np.asarray(parents, np.int64), np.arange(start - 1, stop - 1)
        illegal = (given > previous) | (given < NO_PARENT)
        if illegal.any():
            i = int(illegal.argmax())
            raise ModelError(
                f"row {start + i} has parent {given[i]}; a parent is {NO_PARENT} (none) or a row before its child"
            )
        num_chained = int((given == previous).argmin()) if self.num_prefix_rows == start else 0
        self._append_chain(start + num_chained)
        self._append_tree(given[num_chained:])

    def _append_chain(self, stop: int) -> None:
        """Make the chain longer, up to row ``stop``; nothing to do if there are tree rows."""
        start = self.num_rows
        if start < stop:
            self._parents[start:stop] = np.arange(start - 1, stop - 1)
            self._positions[start:stop] = np.arange(start, stop)
            self.num_prefix_rows = self.num_rows = stop

    def _append_tree(self, parents: IntArray) -> None:
        prefix = self.num_prefix_rows
        self._reserve(self.num_rows + len(parents) - prefix)
        while len(parents):
            first = self.num_rows
            is_new = parents >= first
            num_run = int(is_new.argmax()) if is_new.any() else len(parents)  # rows whose parents all exist by now
            run, parents, last = parents[:num_run], parents[num_run:], first + num_run
            in_tree = run >= prefix
            self._parents[first:last] = run
            self._positions[first:last] = np.where(run == NO_PARENT, 0, self._positions[run] + 1)
            self._num_visible[first:last] = np.where(in_tree, self._num_visible[run], run + 1)
            block = self._ancestors[first - prefix : last - prefix]
            block[:] = False
            block[in_tree] = self._ancestors[run[in_tree] - prefix]
            block[np.arange(num_run), np.arange(first - prefix, last - prefix)] = True
            self.num_rows = last

    def _reserve(self, num_tree_rows: int) -> None:
        held = len(self._ancestors)
        if num_tree_rows > held:
            size = max(num_tree_rows, 2 * held, 64)
            grown = np.zeros((size, size), np.bool_)
            grown[:held, :held] = self._ancestors
            self._ancestors = grown

    def truncate(self, num_rows: int) -> None:
        """Drop all rows from ``num_rows`` on."""
        self.num_rows = num_rows
        self.num_prefix_rows = min(self.num_prefix_rows, num_rows)

    def keep(self, num_first_rows: int, rows: IntArray) -> None:
        """Keep the first rows and then ``rows``, renumbered. Raises: ModelError, see `KVCache.keep`."""
        if not 0 <= num_first_rows <= self.num_rows:
            raise ModelError(f"asked to keep the first {num_first_rows} rows of a sequence of {self.num_rows}")
        parents = self._parents[rows] if len(rows) and int(rows.max()) < self.num_rows else rows[:0]
        if len(parents) != len(rows) or (np.diff(rows, prepend=num_first_rows - 1) < 1).any():
            raise ModelError(
                f"asked to keep rows {rows.tolist()} beyond the first {num_first_rows} of {self.num_rows};"
                " they must ascend and exist"
            )
        place = np.searchsorted(rows, parents)
        is_moved = parents >= num_first_rows
        is_orphan = is_moved & (rows[np.minimum(place, len(rows) - 1)] != parents)
        if is_orphan.any():
            i = int(is_orphan.argmax())
            raise ModelError(f"asked to keep row {rows[i]} without its parent {parents[i]}; keep whole paths")
        self.truncate(num_first_rows)
        self.append(np.where(is_moved, num_first_rows + place, parents))

    def visible(self, start: int) -> tuple[IntArray, IntArray]:
        """Return what rows ``start`` .. num_rows - 1 see.

        Returns: how many of the first rows each sees, [T]; and the other rows that each sees, itself included, in
            ascending order, those of the first row first.
        """
        prefix, stop = self.num_prefix_rows, self.num_rows
        visible = np.arange(start + 1, stop + 1)
        first_tree_row = max(start, prefix)
        visible[first_tree_row - start :] = self._num_visible[first_tree_row:stop]
        _, ancestors = self._ancestors[first_tree_row - prefix : stop - prefix, : stop - prefix].nonzero()
        return visible, ancestors + prefix

    def bias(self, start: int, window: Window = None) -> FloatArray | None:
        """Return what rows ``start`` .. num_rows - 1 must not see, to be added to attention scores.

        Args:
            window: a row sees an ancestor only if their positions differ by less than this, or lie in one chunk; None
                sees all.
        Returns: [T, S rounded up to BIAS_ALIGNMENT] float32, 0 where visible and -inf elsewhere; None if T is 1 and
            the row sees all rows.
        """
        prefix, stop = self.num_prefix_rows, self.num_rows
        positions = self._positions[start:stop]
        is_windowed = (size := window_size(window)) is not None and int(positions.max()) >= size
        if stop - start == 1 and positions[0] == start and not is_windowed:
            return None
        width = -(-stop // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
        bias = np.zeros((stop - start, width), np.float32)
        visible = np.arange(start + 1, stop + 1)
        first_tree_row = max(start, prefix)
        visible[first_tree_row - start :] = self._num_visible[first_tree_row:stop]
        fewest = int(visible.min())
        if fewest < prefix:
            bias[:, fewest:prefix][np.arange(fewest, prefix) >= visible[:, None]] = -np.inf
        bias[:, prefix:] = -np.inf
        if first_tree_row < stop:
            ancestors = self._ancestors[first_tree_row - prefix : stop - prefix, : stop - prefix]
            bias[first_tree_row - start :, prefix:stop][ancestors] = 0.0
        if window is not None and is_windowed:
            bias[:, :stop][_is_out_of_reach(positions[:, None], self._positions[:stop], window)] = -np.inf
        return bias


def window_size(window: Window) -> int | None:
    """Return the first position at which a window hides something; None: it never does."""
    return window.size if isinstance(window, Chunk) else window


def _is_out_of_reach(positions: IntArray, others: IntArray, window: int | Chunk) -> BoolArray:
    if isinstance(window, Chunk):
        return np.not_equal(positions // window.size, others // window.size)
    return positions - others >= window
