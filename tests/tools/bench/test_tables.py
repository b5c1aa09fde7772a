"""Tables of runs fit the terminal, and are whole with --wide."""

from __future__ import annotations

import pytest

from card.tools.bench.tables import SPARE, rich_tables
from tests.cli.test_tables import assert_fits
from tests.tools.bench.bench_files import make_run


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_of_runs_fit(width: int) -> None:
    for table in rich_tables(make_run()):
        assert_fits(table, width=width, spare=SPARE)


def test_a_wide_bench_table_has_every_column_that_holds_something() -> None:
    (first, *_) = rich_tables(make_run(), is_wide=True)
    heads = {str(column.header).replace("\n", " ") for column in first.columns}
    assert {"range vs plain", "tokens a pass", "verified per token", "same text"} <= heads
