"""The script of judges compares them on the same questions, and goes on where it ended."""

from __future__ import annotations

import json

import pytest

from card.errors import SettingsError
from tests.benchmarks.scripts import lines_of
from tests.benchmarks.test_results import RESULTS, rows_of


@pytest.fixture
def command(pair, tmp_path):
    """The script's arguments, but for the judges."""
    rows = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in (1, 2, 3)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    models = ["--target", pair.target, "--draft", pair.draft, "--dtype", "float32"]
    sizes = ["--limit", "3", "--at-once", "2", "--max-tokens", "8"]
    data = ["--data", f"gsm8k={tmp_path / 'problems.jsonl'}", "--out", str(tmp_path / "out.jsonl")]
    return ["judges.py", *models, *sizes, *data]


def test_a_run_has_a_line_for_each_batch_and_judge_and_goes_on(bench, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [*command, "--judge", "relaxed:1"])
    bench["judges"].main()
    lines = lines_of(tmp_path / "out.jsonl")
    assert [(line["first"], line["judge"], line["exact"]) for line in lines] == [
        (0, "exact", True),
        (0, "relaxed:1", False),
        (2, "exact", True),
        (2, "relaxed:1", False),
    ]
    assert [len(line["items"]) for line in lines] == [2, 2, 1, 1]
    assert sum(item["lenient"] for line in lines for item in line["items"] if line["judge"] != "exact") > 0
    whole = capsys.readouterr().out
    (tmp_path / "out.jsonl").write_text("\n".join(map(json.dumps, lines[:3])) + "\n")
    bench["judges"].main()
    again = lines_of(tmp_path / "out.jsonl")
    assert [line["items"] for line in again] == [line["items"] for line in lines]
    rows = [row for row in whole.splitlines() if row.startswith("|")]
    assert rows[2].startswith("| gsm8k, 3 | `exact` |") and capsys.readouterr().out.splitlines()[-4:] == rows


def test_steps_are_judged_by_equations_or_chance_beside_the_draft_model_alone(bench, command, tmp_path, monkeypatch):
    judges = "draft,arbitrage/equations:1,arbitrage/chance:0.5"
    monkeypatch.setattr("sys.argv", [*command, "--judge", judges, "--limit", "2", "--plain"])
    bench["judges"].main()
    lines = lines_of(tmp_path / "out.jsonl")
    assert [(line["judge"], line["exact"]) for line in lines] == [
        ("exact", True),
        *((j, False) for j in judges.split(",")),
    ]
    assert all(0 <= item["drafted_steps"] <= item["steps"] > 0 for line in lines for item in line["items"])
    with pytest.raises(SettingsError, match="needs a knob from 0 to 1"):
        bench["judges"].read_judges("arbitrage/chance")


@pytest.mark.parametrize(
    ("text", "share"), [("3+4=7", 1.0), ("3*4=<<3*4=12>>12 and 12-5=8", 0.5), ("1/0=0", 0.0), ("none", 1.0)]
)
def test_equations_are_checked(bench, text, share):
    assert bench["step_judges"].equations_hold(text) == pytest.approx(share)


def test_lines_of_other_settings_are_refused(bench, command, monkeypatch):
    monkeypatch.setattr("sys.argv", [*command, "--judge", "exact"])
    bench["judges"].main()
    monkeypatch.setattr("sys.argv", [*command, "--judge", "exact", "--max-tokens", "9"])
    with pytest.raises(SystemExit, match="max_tokens 8, asked for is 9"):
        bench["judges"].main()


def test_the_table_leaves_out_questions_that_a_judge_has_not_answered(bench):
    def line(judge, first, found):
        item = {"found": found, "is_solved": True, "passes": 2, "accepted": 3, "lenient": 1, "tokens": 6}
        item["finish"] = "length"
        return {"data": "gsm8k", "judge": judge, "first": first, "items": [item]}

    rows = list(bench["judges"].report([line("exact", 0, "7"), line("fly", 0, "8"), line("exact", 1, "9")]))
    assert len(rows) == 4 and "| gsm8k, 1 | `fly` | 2.50 | 1 of 6 tokens | 1 |" in rows[3]
    assert rows[2].split("|")[-2].strip().startswith("100%") and rows[3].split("|")[-2].strip().startswith("0%")


def test_data_without_a_file_is_refused(bench):
    with pytest.raises(SettingsError, match="NAME=FILE"):
        bench["judges"].read_batches(["gsm8k"], 1, 1)


def test_the_table_of_programs_is_that_of_its_lines(bench):
    heading = "| judge | tokens a pass | passes | kept against the target | all tests passed | same tests as exact |"
    told = [
        [f"{row.tokens_per_pass:.2f}", str(row.num_passes), f"{row.num_lenient} of {row.num_tokens:,} tokens"]
        + [str(share).replace("%", " %") for share in (row.solved, row.same)]
        for row in bench["judges"].summarise(lines_of(RESULTS / "judges_programs.jsonl"))
    ]
    assert [cells for _, *cells in rows_of("src/card/family/judges/README.md", heading)] == told and len(told) > 1
