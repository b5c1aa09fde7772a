"""Rows of exact passes: tables that say where their keys, ancestors and scores lie, as the machine code reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from card.kernels.jit.tables import LOGITS_OF_ROWS, QUERIES, WEIGHTS_OF_ROWS
from card.kernels.number_types import Floats
from card.models.protocol import Extension
from card.models.rows.kv_cache import SequenceRows

IntArray = npt.NDArray[np.int64]
_SCORE_KINDS = {"logits": LOGITS_OF_ROWS, "weights": WEIGHTS_OF_ROWS, "bounds": QUERIES}
_NO_ANCESTORS: IntArray = np.zeros(0, np.int64)


@dataclass(slots=True)
class NewRows:
    """The part of a pass that belongs to one sequence: its newest rows."""

    sequence: SequenceRows
    extension: Extension
    score_room: Floats | None = None  # [P, L, H, N] float32: sums of scores of P parts of the rows, or their queries
    part: int = 0  # rows of a part
    scores: Floats | None = None  # [L, Hkv, S - T] float32, as `AttentionScores.of` gives them

    @property
    def num_new(self) -> int:
        """T, its rows in the pass."""
        return len(self.extension.token_ids)

    @property
    def num_held(self) -> int:
        """S - T: rows that the sequence had before the pass."""
        return self.sequence.tree.num_rows - self.num_new


def row_tables(steps: Sequence[NewRows]) -> tuple[list[tuple[int, ...]], IntArray]:
    """Return a table of the rows of a pass, the entries of a `RowTable` each, and their ancestors."""
    rows: list[tuple[int, ...]] = []
    all_ancestors: list[IntArray] = []
    num_before = 0
    for step in steps:
        tree = step.sequence.tree
        start, place = tree.num_rows - step.num_new, step.sequence.places.ctypes.data
        selections = [_selection(step, idx) for idx in range(step.num_new)]
        if tree.num_prefix_rows == tree.num_rows:  # a chain: each row sees all up to itself
            rows += [
                (place, row, row, row, row + 1, num_before, *one)
                for row, one in zip(range(start, tree.num_rows), selections, strict=True)
            ]
            continue
        visible, ancestors = tree.visible(start)
        positions = tree.positions(start)
        firsts = num_before + np.cumsum(positions + 1 - visible) - (positions + 1 - visible)
        numbers = zip(range(start, tree.num_rows), positions.tolist(), visible.tolist(), firsts.tolist(), strict=True)
        rows += [
            (place, row, position, position, *others, *selection)
            for (row, position, *others), selection in zip(numbers, selections, strict=True)
        ]
        all_ancestors.append(ancestors)
        num_before += len(ancestors)
    return rows, np.concatenate(all_ancestors) if all_ancestors else _NO_ANCESTORS


def input_tables(steps: Sequence[NewRows]) -> IntArray:
    """Return the tables of what convolutions of a pass's rows take in, see `ConvTable`.

    Raises: ModelError if a row hangs below one whose record is gone.
    """
    tables, offset = list[IntArray](), 0
    for step in steps:
        tree, records = step.sequence.tree, step.sequence.records
        assert records is not None
        start = tree.num_rows - step.num_new
        ancestors = tree.ancestors(start, records.layout.num_needed)
        records.require_held(ancestors[(ancestors >= 0) & (ancestors < start)])
        held = np.where(ancestors < 0, 0, records.addresses(ancestors))
        sources = np.where(ancestors < start, held, start - offset - 1 - ancestors)
        places = records.places(np.arange(start, tree.num_rows), tree.num_rows)
        tables.append(np.column_stack((*places, sources)))
        offset += step.num_new
    return np.concatenate(tables)


def _selection(step: NewRows, new_idx: int) -> tuple[int, int, int, int, int, int]:
    """Return what the table of a row says of chosen rows and of scores."""
    reads, room = step.extension.reads, step.score_room
    assert reads is None or reads.rows.flags.c_contiguous
    chosen = (0, 0, 0) if reads is None else (reads.rows.ctypes.data, reads.rows.shape[2], reads.since)
    if room is None:
        return (*chosen, 0, 0, 0)
    assert step.extension.scores is not None
    kind = _SCORE_KINDS[step.extension.scores]
    return (*chosen, room[new_idx // step.part].ctypes.data, room.shape[3], kind)
