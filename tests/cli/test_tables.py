"""Tables fit the terminal, say what they leave out, and are whole with --wide."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from card.cli.demo import Racer, closing_table
from card.cli.parts.tables import show
from card.engine.metrics import RequestStats


def printed(table: Table, *, width: int, spare: tuple[str, ...] = (), is_wide: bool = False) -> list[str]:
    """Return the lines that a terminal of this width shows."""
    console = Console(file=io.StringIO(), width=width)
    show(console, table, spare=spare, is_wide=is_wide)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def small_table() -> Table:
    table = Table("name", "first\nvalue", "second", "third", box=None)
    table.add_row("a row with a name", "11111", "22222", "33333")
    return table


def test_columns_are_left_out_from_the_last_one_until_the_rest_fits() -> None:
    spare = ("first value", "second")
    whole = printed(small_table(), width=60, spare=spare)
    assert "22222" in whole[-1] and "33333" in whole[-1]
    narrow = printed(small_table(), width=36, spare=spare)
    assert "22222" not in "".join(narrow) and "11111" in narrow[-3] and "33333" in narrow[-3]
    assert " ".join(" ".join(narrow[-2:]).split()) == "left out here: second; --wide shows all columns"
    narrower = printed(small_table(), width=26, spare=spare)
    assert "left out here: first value, second;" in " ".join(line.strip() for line in narrower)


def test_wide_tables_are_neither_cut_nor_wrapped() -> None:
    wide, roomy = (printed(small_table(), width=width, is_wide=width == 20) for width in (20, 200))
    assert [line.rstrip() for line in wide] == [line.rstrip() for line in roomy]


def demo_table() -> Table:
    stats = RequestStats(num_new_tokens=100, wall_s=0.2, target_passes=20, accepted_tokens=80, drafter_passes=50)
    stats.drafter_busy_s = 0.1
    plain = RequestStats(num_new_tokens=100, wall_s=0.6)
    lanes = [Racer("vanilla", None, stats=[plain]), Racer("card", None, stats=[stats])]  # type: ignore[arg-type]
    return closing_table(lanes)


def assert_fits(table: Table, *, width: int, spare: tuple[str, ...]) -> None:
    lines = printed(table, width=width, spare=spare)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines), lines
    said = " ".join(lines)
    assert "tokens/s" in said and ("same" in said or "speed-up" in said)


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_of_demo_fits(width: int) -> None:
    assert_fits(demo_table(), width=width, spare=("hit rate", "drafter layers/s", "share of ceiling"))


def test_the_demo_table_keeps_its_lines_whole_in_80_columns_and_says_what_it_leaves_out() -> None:
    spare = ("hit rate", "drafter layers/s", "share of ceiling")
    narrow, roomy = (printed(demo_table(), width=width, spare=spare) for width in (80, 300))
    assert len(narrow) == len(roomy) + 1
    assert narrow[-1].startswith("left out here: share of ceiling; --wide")
