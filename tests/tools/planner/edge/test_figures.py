"""Figures of decoding come from the lines of `card bench` where there are some, and say where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from card.errors import PlanError
from card.tools.bench.records import Run
from card.tools.planner.edge.figures import figures_of, measured_figures
from card.tools.planner.edge.study import make_edge_study
from tests.tools.bench.bench_files import make_run, write_run
from tests.tools.planner.edge.places import DRAFT, TARGET, small

ROWS = (
    ("vanilla-all-cores", "vanilla", 30.0, 1.0, 0.0),
    ("sps", "sps", 48.0, 2.9, 210.0),
    ("card-tree", "card", 66.0, 3.2, 190.0),
    ("card", "card", 66.0, 3.2, 190.0),
)
BESIDE = {"drafter": "beside", "policy": "fixed"}
# One text of 39 tokens of decoding. Of 40 candidates that chains reach 30 are right, so about 9.75 of 39 are wrong.
CHAINS = {"offered_per_depth": [18, 18, 18], "accepted_per_depth": [12, 10, 8], "accepted_tokens": 30}
TREES = {"misses": 2, "drafter_passes": 61, "rolled_back_tokens": 40}


def _run(**trees: Any) -> Run:
    """Return a run whose texts all have these counters in the rows of sps and card-tree."""
    run = make_run(rows=ROWS, num_prompts=1, repeats=1)
    told = {"sps": CHAINS, "card-tree": {**TREES, **trees}}
    samples = tuple(
        one if one.stats is None else replace(one, stats=replace(one.stats, **told.get(one.row, {})))
        for one in run.samples
    )
    rows = tuple(replace(row, settings=BESIDE if row.name == "card-tree" else {}) for row in run.rows)
    return replace(run, samples=samples, rows=rows)


def test_figures_are_those_that_the_counters_say(tmp_path: Path):
    path = write_run(tmp_path / "a.jsonl", _run())
    found = measured_figures(path)
    wrong = 0.25 * 39
    hit_rate = 1.0 - 2.0 / wrong
    assert found["acceptance"].value == pytest.approx(30 / 40)
    assert found["hit_rate"].value == pytest.approx(hit_rate)
    assert found["kept_share"].value == pytest.approx((1.0 - (61 - 37) / 40) / hit_rate)  # 24 layers were for nothing
    assert found["acceptance"].source == f"40 candidates of sps in {path}"
    assert found["hit_rate"].source == f"about 10 wrong first candidates of card-tree in {path}"


def test_rows_that_change_over_or_have_a_judge_tell_nothing(tmp_path: Path):
    run = _run()
    told = {"card-tree": "card-tree/fly", "sps": "sps"}
    rows = tuple(replace(row, name=told.get(row.name, row.name)) for row in run.rows)
    samples = tuple(replace(one, row=told.get(one.row, one.row)) for one in run.samples)
    checks = tuple(replace(one, row=told.get(one.row, one.row)) for one in run.checks)
    path = write_run(tmp_path / "a.jsonl", replace(run, rows=rows, samples=samples, checks=checks))
    assert set(measured_figures(path)) == {"acceptance"}


def test_a_draft_that_is_never_wrong_leaves_the_other_figures_as_they_are(tmp_path: Path):
    run = _run()
    always = {"offered_per_depth": [10, 10], "accepted_per_depth": [10, 10], "accepted_tokens": 20}
    samples = tuple(
        replace(one, stats=replace(one.stats, **always)) if one.row == "sps" and one.stats else one
        for one in run.samples
    )
    found = measured_figures(write_run(tmp_path / "a.jsonl", replace(run, samples=samples)))
    assert set(found) == {"acceptance"} and found["acceptance"].value == 1.0


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (make_run(rows=ROWS[:1]), "has no row of sps, which tells acceptance, but vanilla-all-cores; make it with"),
        (make_run(rows=ROWS, pairs=("a", "b")), "has several pairs, a, b; a plan has one"),
    ],
)
def test_a_file_that_does_not_tell_is_refused(tmp_path: Path, run: Run, words: str):
    with pytest.raises(PlanError, match=words):
        measured_figures(write_run(tmp_path / "a.jsonl", run))


def test_what_is_no_bench_file_is_refused(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"benchmark": "edge"}\n')
    with pytest.raises(PlanError, match="no line of a bench file"):
        measured_figures(path)


def test_a_study_says_where_each_figure_comes_from():
    study = make_edge_study([small(acceptance=0.9)], TARGET, DRAFT, sources={"acceptance": "--synthetic"})
    told = {figure.name: figure for figure in study.figures}
    assert (told["acceptance"].value, told["acceptance"].source) == (0.9, "--synthetic")
    assert [told[name].source for name in ("hit_rate", "kept_share")] == ["default"] * 2
    assert told["wrong_passes"].value > 0 and "virtual clocks" in told["wrong_passes"].source
    assert figures_of(small(), {}) == figures_of(small(seed=1), {})
