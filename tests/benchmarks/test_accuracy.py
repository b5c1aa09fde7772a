"""The accuracy script reads GSM8K's form, finds final numbers, and counts what is solved."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from card.errors import BenchError
from tests.benchmarks.scripts import lines_of


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("... so 3 + 4 = 7.\n#### 7", "7"),
        ("#### $1,234.50 in all, of 99", "1234.50"),
        ("She has 12 left.", "12"),
        ("The answer is \\boxed{-5}.", "-5"),
        ("It costs $0.75 each, 18.00 in all.", "18.00"),
        ("#### seven, not 8", "8"),
        ("#### 5\n#### 6", "6"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_is_found(bench, text, number):
    assert bench["accuracy"].final_number(text) == (None if number is None else Decimal(number))


def test_equal_numbers_are_equal_however_they_are_written(bench):
    find = bench["accuracy"].final_number
    assert find("#### 18") == find("18.00") == find("so $18.0")


def test_a_run_counts_and_keeps_each_item(bench, pair, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"question": f"What is {n}?", "answer": f"It is.\n#### {n}"} for n in (1, 2, 3)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    command = ["accuracy.py", pair.target, "--prompts", str(prompts), "--limit", "2", "--dtypes", "float32"]
    monkeypatch.setattr("sys.argv", [*command, "--max-tokens", "4", "--out", str(tmp_path / "out.jsonl")])
    bench["accuracy"].main()
    (line,) = lines_of(tmp_path / "out.jsonl")
    assert (line["model"], line["dtype"], line["num_items"], len(line["items"])) == ("target", "float32", 2, 2)
    assert line["num_solved"] == sum(item["is_solved"] for item in line["items"])
    assert {"machine", "command", "commit", "prompts"} <= line.keys()
    assert " of 2 solved" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{}", "no JSON", '{"question": "a", "answer": "no mark 5"}', "[1]"])
def test_other_files_are_refused(bench, tmp_path, content):
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(BenchError):
        bench["accuracy"].read_items(tmp_path / "prompts.jsonl", 5)
