"""The picture of what judges cost and earn has a point for each row whose questions have answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from card.tools.bench.records import Run
from card.tools.bench.summary import Share
from tests.tools.bench.bench_files import BASELINE, make_run, write_run

ROWS = (
    (BASELINE, "vanilla", 30.0, 1.0, 0.0),
    ("sps", "sps", 48.0, 2.9, 210.0),
    ("sps/relaxed:0.2", "sps", 52.0, 3.2, 210.0),
    ("sps/relaxed:0.5", "sps", 60.0, 4.2, 210.0),
    ("sps//models/judge.safetensors", "sps", 60.0, 4.0, 210.0),
)


def judged_run() -> Run:
    """Return a run of two questions, of which judges change the second one's number."""
    run = make_run(rows=ROWS, repeats=1)
    samples = []
    for one in run.samples:
        number = "7" if one.prompt == 0 or "/" not in one.row else "8"
        samples.append(replace(one, final_number=number, is_solved=number == "7"))
    rows = tuple(replace(row, is_exact="/" not in row.name) for row in run.rows)
    checks = tuple(check for check in run.checks if "/" not in check.row)
    return replace(run, rows=rows, samples=tuple(samples), checks=checks)


def test_points_are_grouped_by_judge_and_the_exact_row_is_none(bench: dict[str, ModuleType]) -> None:
    found = bench["plot_frontier"].points(judged_run(), solved=False)
    assert [point.knob for point in found] == ["", "0.2", "0.5", ""]
    assert [(point.judge, point.share.count, point.share.of) for point in found] == [
        ("", 2, 2),
        ("relaxed", 1, 2),
        ("relaxed", 1, 2),
        ("judge.safetensors", 1, 2),
    ]


def test_the_picture_is_a_png(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, out = write_run(tmp_path / "a.jsonl", judged_run()), tmp_path / "images" / "judges.png"
    for options in ([], ["--solved"]):
        assert bench["plot_frontier"].main([str(path), "--out", str(out), *options]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")


def test_a_judge_that_keeps_no_answer_is_drawn(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    point = bench["plot_frontier"].Point
    found = [point("", "", 6.8, Share(24, 24)), point("kl", "0.5", 9.7, Share(0, 24))]  # its interval begins at 0
    bench["plot_frontier"].draw({"24 questions": found}, "same, %", "", tmp_path / "judges.png")
    assert (tmp_path / "judges.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_judges_have_a_panel_for_each_data_set(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    def line(data: str, judge: str, found: str) -> dict[str, object]:
        item = {"found": found, "is_solved": found == "7", "passes": 2, "accepted": 3, "lenient": 1, "tokens": 6}
        items = [{**item, "finish": "stop"}, {**item, "found": "7", "is_solved": True, "finish": "length"}]
        names = {"benchmark": "judges", "target": "a.gguf", "draft": "b.gguf"}
        return {**names, "data": data, "judge": judge, "first": 0, "items": items}

    rows = [line("gsm8k", "exact", "7"), line("gsm8k", "fly:0.9", "8"), line("mbpp", "exact", "7")]
    path = tmp_path / "judges.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    panels, note = bench["plot_frontier"].read(path, solved=True)
    assert note.startswith("a.gguf, b.gguf") and list(panels) == ["2 questions of gsm8k", "2 questions of mbpp"]
    found = [(point.judge, point.knob, point.share.count) for point in panels["2 questions of gsm8k"]]
    assert found == [("", "", 2), ("fly", "0.9", 1)]
    pytest.importorskip("matplotlib")
    assert bench["plot_frontier"].main([str(path), "--out", str(tmp_path / "judges.png")]) == 0


def test_a_run_without_answers_is_refused_in_one_line(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a.jsonl", make_run())
    assert bench["plot_frontier"].main([str(path)]) == 2
    assert capsys.readouterr().err == "plot_frontier.py: error: no row to show; the questions need answers\n"
