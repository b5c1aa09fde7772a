"""Tables of runs fit the terminal, and are whole with --wide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from card.tools.bench.records import Run
from card.tools.bench.summary import summarise
from card.tools.bench.tables import SPARE, cells, rich_tables
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


def test_a_row_says_whether_its_text_is_the_same_and_its_draft_length() -> None:
    def shown(run: Run) -> dict[str, str]:
        return {line["method"]: line["same text"] for line in (cells(run, row) for row in summarise(run))}

    run = make_run(repeats=1)
    assert set(shown(run).values()) == {"yes"}
    checks = tuple(replace(one, num_equal=1) if one.row == "sps" else one for one in run.checks)
    rows = tuple(replace(one, is_exact=False) if one.name == "lookahead" else one for one in run.rows)
    rows = tuple(replace(one, settings={"num_speculative_tokens": 5}) if one.name == "sps" else one for one in rows)
    found = shown(replace(run, checks=checks, rows=rows))
    assert found["sps K=5"] == "near-ties: 1 of 2 differ" and found["lookahead"] == "not exact"
