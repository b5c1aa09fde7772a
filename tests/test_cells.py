"""Tables of tests: no cell is lost, and each two values meet in a cell that `make test` takes."""

from __future__ import annotations

import itertools

import pytest

from tests.cells import crossed

AXES = [("a", "b", "c", "d"), (1, 2, 3), (True, False)]


def test_every_cell_is_there_once() -> None:
    assert sorted(cell.values for cell in crossed(*AXES)) == sorted(itertools.product(*AXES))


def test_each_two_values_meet_in_a_cell_that_is_not_slow() -> None:
    quick = [cell.values for cell in crossed(*AXES) if pytest.mark.slow not in cell.marks]
    for (one, ones), (other, others) in itertools.combinations(enumerate(AXES), 2):
        assert {(cell[one], cell[other]) for cell in quick} == set(itertools.product(ones, others))
    assert len(quick) < len(crossed(*AXES))
