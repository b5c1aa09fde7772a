"""Tables and picture show the figures of a bench file, and refuse one that was tampered with."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from card.tools.bench.records import Run
from card.tools.bench.summary import Spread, summarise
from card.tools.bench.tables import cells
from tests.tools.bench.bench_files import make_run, write_run

PAIR = "demo-90M"
WRITERS = (
    ("vanilla-all-cores", "vanilla", 30.0, 1.0, 0.0),
    ("suffix", "suffix", 33.0, 1.2, 0.0),
    ("recycling", "recycling", 36.0, 1.3, 0.0),
    ("card", "card", 90.0, 3.2, 190.0),
    ("card-writers", "card", 66.0, 3.2, 190.0),
)


def test_a_point_is_the_ratio_to_plain_decoding_repeat_by_repeat(bench: dict[str, ModuleType]) -> None:
    plot = bench["plot"]
    found = plot.points(make_run(workloads=("gsm8k", "code"), repeats=3))
    assert list(found) == ["gsm8k", "code"] and set(found["gsm8k"]) == {"card", "sps", "lookahead"}
    assert plot.by_speed(found) == ["lookahead", "sps", "card"]
    card: Spread = found["gsm8k"]["card"]
    assert len(card.runs) == 3 and card.least <= card.median <= card.most
    assert found["gsm8k"]["lookahead"].most < 1  # losses are drawn, too
    assert set(plot.points(make_run(pairs=("a", "b")))) == {"a, gsm8k", "b, gsm8k"}


def test_the_picture_is_a_png_of_a_phone_s_width_with_a_row_per_method(
    bench: dict[str, ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path, out = write_run(tmp_path / "a.jsonl", make_run()), tmp_path / "images" / "methods.png"
    heights = []
    for options in ([], ["--methods", "card"]):
        assert bench["plot"].main([str(path), "--out", str(out), *options]) == 0
        data = out.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(data[16:20], "big") == 1280
        heights.append(int.from_bytes(data[20:24], "big"))
    assert heights[0] > heights[1] > 0


def test_a_packed_file_makes_the_same_table_as_the_file_that_was_packed(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a.jsonl", make_run())
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    printed = []
    for file in (path, packed):
        assert bench["table"].main([str(file)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""
    packed.write_bytes(path.read_bytes())
    assert bench["table"].main([str(packed)]) == 2
    assert "table.py: error:" in capsys.readouterr().err


def test_a_run_makes_a_markdown_table_with_the_fastest_row_in_bold(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a.jsonl", make_run())
    assert bench["table"].main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| method | tokens/s | range | vs plain |")
    assert "| **card** |" in printed and "| lookahead |" in printed and "at commit `0123456789ab`" in printed
    assert bench["table"].main([str(path), "--columns", "method,vs plain"]) == 0
    assert capsys.readouterr().out.startswith("| method | vs plain |\n")


def test_workloads_and_pairs_are_compared_and_several_writers_with_each_alone(bench: dict[str, ModuleType]) -> None:
    text = bench["table"].bench_tables(make_run(rows=WRITERS, workloads=("gsm8k", "code"), pairs=("a", "b")))
    assert text.startswith("Against vanilla-all-cores:\n\n| method | a, gsm8k | a, code | b, gsm8k | b, code |")
    assert text.replace("**", "").count("| recycling |") == 5  # in the comparison and in each table
    assert "| pair, workload | / card | / suffix | / recycling | / the best of them |" in text
    line = next(line for line in text.splitlines() if line.startswith("| b, code |"))
    card, suffix, recycling, best = (float(cell) for cell in line.split("|")[2:-1])
    assert best == card < 1 < recycling < suffix
    assert "b, code, 2 prompts:" in text


def test_a_row_says_whether_its_text_is_the_same_and_its_draft_length() -> None:
    run = make_run(repeats=1)
    lines = {line["method"]: line for line in table_lines(run)}
    assert {line["same text"] for line in lines.values()} == {"yes"}
    checks = tuple(replace(one, num_equal=1) if one.row == "sps" else one for one in run.checks)
    rows = tuple(replace(one, is_exact=False) if one.name == "lookahead" else one for one in run.rows)
    rows = tuple(replace(one, settings={"num_speculative_tokens": 5}) if one.name == "sps" else one for one in rows)
    lines = {line["method"]: line for line in table_lines(replace(run, checks=checks, rows=rows))}
    assert lines["sps K=5"]["same text"] == "near-ties: 1 of 2 differ"
    assert lines["lookahead"]["same text"] == "not exact"


def table_lines(run: Run) -> list[dict[str, str]]:
    return [cells(run, row) for row in summarise(run)]


@pytest.mark.parametrize("script", ["table", "plot"])
def test_a_file_without_one_method_s_result_is_refused(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    path = write_run(tmp_path / "a.jsonl", make_run())
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines if one.get("row") != "card"))
    out = ["--out", str(tmp_path / "none.png")] if script == "plot" else []
    assert bench[script].main([str(path), *out]) == 2
    captured = capsys.readouterr()
    assert f"{script}.py: error: {path}, line" in captured.err and captured.out == ""
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("text", ["", "{}\n", "no JSON\n", '{"benchmark": "methods", "started": "", "command": ""}\n'])
def test_a_file_with_nothing_to_show_is_refused(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    assert bench["table"].main([str(path)]) == 2
    assert bench["plot"].main([str(path), "--out", str(tmp_path / "none.png")]) == 2
    captured = capsys.readouterr().err
    assert "table.py: error:" in captured and "plot.py: error:" in captured
