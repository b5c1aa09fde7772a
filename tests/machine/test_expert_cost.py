"""Experts of a pass: predicted from those of other passes, and the price that measured passes put on them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.errors import SettingsError
from card.machine.expert_cost import ExpertCounts, ExpertPrice, ExpertUse
from card.machine.pass_cost import PassCost

LAYERS, EXPERTS, CHOSEN = 10, 64, 4
SIZES = (1, 2, 4, 8, 16, 32, 64)


def counts(counted: tuple[tuple[int, int], ...] = ()) -> ExpertCounts:
    return ExpertCounts(num_experts=LAYERS * EXPERTS, per_row=LAYERS * CHOSEN, counted=counted)


def independent(num_rows: int) -> float:
    return LAYERS * EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** num_rows)


def read_by_rows(num_rows: int, alike: float, seed: int = 0) -> int:
    """Return the distinct experts of rows that take each expert over from the row before with chance ``alike``."""
    draw, read = random.Random(seed), set[tuple[int, int]]()
    for layer in range(LAYERS):
        chosen = set(draw.sample(range(EXPERTS), CHOSEN))
        for _ in range(num_rows):
            read |= {(layer, expert) for expert in chosen}
            kept = {expert for expert in chosen if draw.random() < alike}
            others = [expert for expert in range(EXPERTS) if expert not in kept]
            chosen = kept | set(draw.sample(others, CHOSEN - len(kept)))
    return len(read)


# ---- how many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", SIZES)
def test_without_any_count_rows_are_taken_to_choose_independently(num_rows: int) -> None:
    assert ExpertUse(counts()).expected(num_rows) == pytest.approx(independent(num_rows))


def test_one_row_reads_what_one_row_reads_whatever_was_counted() -> None:
    for counted in ((), ((2, 50),), ((8, 600),)):
        assert ExpertUse(counts(counted)).expected(1) == LAYERS * CHOSEN


@pytest.mark.parametrize("alike", [0.0, 0.25, 0.6])
def test_the_overlap_of_some_passes_tells_that_of_others(alike: float) -> None:
    use = ExpertUse(counts(tuple((size, read_by_rows(size, alike)) for size in (1, 2, 8, 64))))
    for num_rows in (3, 4, 6, 16):
        seen = sum(read_by_rows(num_rows, alike, seed) for seed in range(1, 9)) / 8
        assert use.expected(num_rows) == pytest.approx(seen, rel=0.08)
        assert use.expected(num_rows) < independent(num_rows) * 1.04


def test_where_some_experts_are_popular_later_rows_bring_fewer_than_even_choices_would() -> None:
    draw, weights = np.random.default_rng(0), 1.0 / np.arange(1, EXPERTS + 1)

    def read(num_rows: int) -> int:
        rows = (
            (layer, draw.choice(EXPERTS, CHOSEN, replace=False, p=weights / weights.sum()))
            for layer in range(LAYERS)
            for _ in range(num_rows)
        )
        return len({(layer, int(expert)) for layer, row in rows for expert in row})

    use = ExpertUse(counts(tuple((size, read(size)) for size in SIZES)))
    for num_rows in (2, 3, 5, 12, 24):
        seen = sum(read(num_rows) for _ in range(8)) / 8
        assert use.expected(num_rows) == pytest.approx(seen, rel=0.06)
    alike = ExpertUse(counts(((2, round(use.expected(2))),)))
    assert use.expected(32) < 0.9 * alike.expected(32)


def test_a_pass_that_read_all_experts_says_nothing() -> None:
    known = ExpertUse(counts(((2, 70),)))
    assert ExpertUse(counts(((2, 70), (64, LAYERS * EXPERTS)))).expected(8) == known.expected(8)


def test_later_passes_outweigh_earlier_ones_that_fade() -> None:
    use = ExpertUse(counts(((4, 140),)), kept=0.9)
    for _ in range(60):
        use.observe(4, 90)
    assert use.expected(4) == pytest.approx(90, rel=0.01)


def test_rows_that_all_choose_every_expert_bring_none() -> None:
    use = ExpertUse(ExpertCounts(num_experts=8, per_row=8))
    use.observe(3, 8)
    assert [use.expected(num_rows) for num_rows in (1, 2, 9)] == [8, 8, 8]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"per_row": 0}, "a row must read 1 to 8 of 8 experts, got 0"),
        ({"per_row": 9}, "got 9"),
        ({"counted": ((0, 4),)}, "got 0 rows and 4 experts"),
        ({"counted": ((2, 9),)}, "got 2 rows and 9 experts"),
    ],
)
def test_counts_that_cannot_be_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        ExpertCounts(**{"num_experts": 8, "per_row": 2, **changes})  # type: ignore[arg-type]


# ---- what they cost -------------------------------------------------------------------------------------------------


@given(parts=st.tuples(*[st.floats(1e-4, 1e-2)] * 3))
def test_the_parts_of_the_price_are_found_in_passes_that_have_it(parts: tuple[float, float, float]) -> None:
    known = counts(tuple((size, round(independent(size))) for size in SIZES))
    points = [(size, ExpertPrice(*parts).seconds(size, num_read)) for size, num_read in known.counted]
    found = ExpertPrice.fitted(points, known)
    assert (found.pass_s, found.expert_s, found.row_s) == pytest.approx(parts, rel=1e-3)


@given(points=st.lists(st.floats(1e-5, 1.0), min_size=2, max_size=7))
def test_no_part_is_paid_for_whatever_was_measured(points: list[float]) -> None:
    found = ExpertPrice.fitted(list(zip(SIZES, points, strict=False)), counts())
    assert min(found.pass_s, found.expert_s, found.row_s) >= 0.0
    assert found.seconds(4, 150) > 0.0


def test_what_lies_between_two_passes_is_priced_by_its_experts() -> None:
    cost = PassCost(((1, 1.0), (8, 4.0)), experts=counts())
    assert [cost.seconds(size) for size in (1, 8)] == pytest.approx([1.0, 4.0])
    assert cost.seconds(4) > 1.0 + 3.0 * 3 / 7, "above the line"


def test_a_pass_is_priced_by_the_experts_that_it_is_said_to_read() -> None:
    cost = PassCost(((1, 1.0), (8, 4.0)), 0.5, 0.01, counts())
    each = (cost.seconds(8) - cost.seconds(1)) / (independent(8) - independent(1))
    assert cost.seconds(8, num_experts=100) == pytest.approx(1.0 + 60 * each)
    assert cost.seconds(8, 3, 50, num_experts=40) == pytest.approx(1.0 + 2 * 0.5 + 50 * 0.01)
    assert cost.scaled(3.0).seconds(5, 2, 9) == pytest.approx(3.0 * cost.seconds(5, 2, 9))
    assert cost.seconds(0, num_experts=40) == 0.0
