"""The script of forecasts counts passes, rows and calls, and adds forecasts up."""

from __future__ import annotations

import math

import pytest
import torch
from click.testing import CliRunner

from card.labs.series.forecaster import save_forecaster
from card.labs.series.transformer import PatchTransformer, Shape
from tests.benchmarks.scripts import lines_of


def run(bench, out, *asked):
    assert (
        CliRunner().invoke(bench["forecasts"].main, [*asked, "--out", str(out)], catch_exceptions=False).exit_code == 0
    )
    return lines_of(out)


@pytest.fixture(scope="module")
def free(bench, tmp_path_factory):
    asked = [
        "shape",
        "--layers",
        "0",
        "--acceptance",
        "1.0",
        "--acceptance",
        "0.5",
        "--continuations",
        "1,4",
        "--seeds",
        "2",
    ]
    lines = run(bench, tmp_path_factory.mktemp("free") / "out.jsonl", *asked, "--seeds", "2")
    return {(line["continuations"], line["forced"]): line for line in lines}


def test_plain_forecasts_take_a_pass_and_a_row_of_each_continuation_for_each_patch(free):
    for count in (1, 4):
        target = free[count, 0.0]["target"]
        assert (target["passes"], target["rows"]) == (2 * 12, 2 * 12 * count)
        assert target["rows_without_cache"] == 2 * count * sum(range(16, 28)), "a pass reads the context, too"
        assert free[count, 0.0]["draft"] is None


def test_what_is_always_accepted_takes_a_quarter_of_the_passes_and_no_row_more(free):
    for count in (1, 4):
        line = free[count, 1.0]
        assert (line["target"]["passes"], line["target"]["rows"]) == (2 * 3, 2 * 12 * count)
        assert line["draft"]["passes"] == 2 * 3 * 3 and line["acceptance"] == 1.0
        assert line["target"]["rows_without_cache"] == 2 * count * (19 + 23 + 27)


def test_what_is_rejected_costs_rows_and_calls(free):
    all_kept, half = free[4, 1.0], free[4, 0.5]
    assert (
        half["target"]["rows"] > all_kept["target"]["rows"] and half["target"]["passes"] > all_kept["target"]["passes"]
    )
    assert half["calls"] > all_kept["calls"] > 0


def test_trained_forecasters_are_counted_on_windows_of_a_series(bench, tmp_path):
    for name, width in (("target", 16), ("draft", 8)):
        torch.manual_seed(width)
        save_forecaster(PatchTransformer(Shape(width=width, num_layers=1, num_heads=2)), tmp_path / name)
    values = "\n".join(str(math.sin(i / 5)) for i in range(900))
    (tmp_path / "load.csv").write_text(f"load\n{values}\n")
    models = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    asked = ["series", *models, "--series", f"{tmp_path / 'load.csv'}:load", "--windows", "2", "--continuations", "3"]
    plain, drafted = run(bench, tmp_path / "out.jsonl", *asked)
    assert (plain["series"], plain["column"], plain["forecasts"]) == ("load.csv", "load", 2)
    assert plain["target"]["rows"] == 2 * 12 * 3 and drafted["draft"]["passes"] > 0
