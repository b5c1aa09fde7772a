"""A copy that ends where a landmark begins: a third text that shares it must find records of its last rows there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from card.models.protocol import Extension
from card.models.recording_runner import RecordingRunner
from card.models.rows.records import BLOCK_ROWS

AROUND_LANDMARK = range(BLOCK_ROWS - 2, BLOCK_ROWS + 1)
"""Rows of copies that end before the first landmark of a model that has one each `BLOCK_ROWS` rows, or at it."""


def check_copy_before_landmark(
    runner: RecordingRunner,
    text: Sequence[int],
    num_rows: int,
    goes_on: Callable[[RecordingRunner, int, Sequence[int]], bool],
) -> None:
    """Copy the first rows of a text, read its rest there, and copy that: the second copy goes on as the text does."""
    source, slot, other = (runner.open() for _ in range(3))
    runner.forward([Extension.of_text(source, text[: num_rows + 1])])
    runner.copy_rows(source, slot, num_rows)
    runner.forward([Extension.of_text(slot, text, num_rows)])
    assert runner.lendable_rows(slot, BLOCK_ROWS) == BLOCK_ROWS
    runner.copy_rows(slot, other, BLOCK_ROWS)
    assert goes_on(runner, other, text[:BLOCK_ROWS])
    for one in (source, slot, other):
        runner.close(one)
