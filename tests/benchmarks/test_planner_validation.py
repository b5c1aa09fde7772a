"""Measured and planned speeds make lines, a table and a picture; the planner is told nothing of the runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.tools.bench.lineup import LineupSettings
from card.tools.bench.row_names import BASELINE
from tests.benchmarks.scripts import lines_of
from tests.pair import Pair

NUM_TOKENS = 12
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def results(bench: dict[str, ModuleType], pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    prompts, out = folder / "prompts.jsonl", folder / "planner_validation.jsonl"
    prompts.write_text(json.dumps({"question": "how many cats sat?"}) + "\n")
    options = ["--prompts", str(prompts), "--limit", "1", "--target", pair.target, "--draft", pair.draft]
    options += ["--dtype", "float32", "--max-tokens", str(NUM_TOKENS), "--repeats", "5", "--time-limit", "0"]
    options += ["--rows", "sps-all-cores"]
    assert bench["planner_validation"].main([*options, "--length", "3", "--out", str(out)]) == 0
    return out


@needs_two_cores
def test_each_row_says_what_was_measured_what_was_planned_and_by_how_much_they_differ(results: Path) -> None:
    *rows, profiles = lines_of(results)
    assert [line["row"] for line in rows] == [BASELINE, "sps-all-cores"]
    for line in rows:
        assert (line["benchmark"], line["kind"], line["price"]) == ("planner_validation", "row", "none")
        assert (line["num_texts"], line["num_texts_equal"], line["num_prompts"]) == (2, 2, 1)
        assert line["repeats"] == len(line["measured_runs"]) == 2  # there was no time for more
        speeds = line["measured_tokens_per_s"], line["planned_tokens_per_s"]
        assert line["error"] == pytest.approx(speeds[1] / speeds[0] - 1, abs=2e-3)
        ratios = line["measured_ratio"], line["planned_ratio"]
        assert line["ratio_error"] == pytest.approx(ratios[1] / ratios[0] - 1, abs=2e-3)
        for parts in (line["measured_parts"], line["planned_parts"]):
            assert parts["pass_ms"] > 0
    plain, sps = rows
    assert plain["measured_ratio"] == plain["planned_ratio"] == 1.0
    assert plain["planned_parts"]["tokens_per_pass"] == 1.0
    for name in ("tokens_per_pass", "verified_per_pass"):  # what no clock touches
        assert sps["planned_parts"][name] == sps["measured_parts"][name]
    assert sps["length"] == sps["planned_length"] == 3
    assert profiles["kind"] == "profiles"
    assert [setup["threads"] for setup in profiles["target_profile"]["setups"]] == [1, 2]
    assert profiles["target_profile"]["overheads"]["beside_factor"] >= 1.0
    assert profiles["draft_profile"]["overheads"]["latency_s"] > 0


@needs_two_cores
def test_the_lines_make_a_table_and_a_picture(
    bench: dict[str, ModuleType], results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert bench["validation_report"].main([str(results)]) == 0
    assert "| sps-all-cores |" in capsys.readouterr().out
    out = tmp_path / "images" / "validation.png"
    assert bench["plot_validation"].main([str(results), "--out", str(out)]) == 0
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def line(price: str, row: str, error: float, **changes: Any) -> dict[str, Any]:
    parts = {name: 1.0 for name in ("pass_ms", "waited_ms", "overhead_ms", "tokens_per_pass")}
    parts |= {"drafter_passes_per_pass": 0.0, "drafter_pass_ms": None}
    speeds = {"measured_tokens_per_s": 100.0, "planned_tokens_per_s": 100 * (1 + error), "error": error}
    ratios = {"measured_ratio": 2.0, "planned_ratio": 2 * (1 + error), "ratio_error": error}
    texts = {"num_texts": 4, "num_texts_equal": 3, "length": None, "planned_length": 6}
    both = {"measured_parts": parts, "planned_parts": parts}
    return {"kind": "row", "price": price, "row": row, **speeds, **ratios, **texts, **both, **changes}


def test_the_last_line_of_each_price_and_row_counts(bench: dict[str, ModuleType]) -> None:
    lines = [line("90M", "card", 0.5), line("300M", "card", -0.04), line("90M", "card", 0.08)]
    text = bench["validation_report"].tables_of([*lines, {"kind": "profiles", "price": "90M"}])
    assert text.count("| card | 100.0 |") == 2
    assert "| 90M | 1 | 8.0% | 8.0% |" in text and "| 300M | 1 | 4.0% | 4.0% |" in text
    assert "| all | 2 | 6.0% | 6.0% |" in text
    assert "50" not in text


def test_the_error_of_the_baseline_is_one_of_speed_alone(bench: dict[str, ModuleType]) -> None:
    rows = [line("90M", BASELINE, 0.2, ratio_error=0.0), line("90M", "sps", -0.1), line("90M", "card", 0.04)]
    errors = bench["validation_report"].median_errors(rows)
    assert errors == {"tokens/s": pytest.approx(0.1), "against plain decoding": pytest.approx(0.07)}


def test_speeds_are_compared_as_medians_and_ratios_repeat_by_repeat(bench: dict[str, ModuleType]) -> None:
    rates = bench["validation_report"].Rates
    found = bench["validation_report"].compared(
        rates([10.0, 40.0, 30.0], [33.0, 33.0, 33.0]), rates([10.0, 20.0, 10.0], [11.0, 11.0, 11.0])
    )
    assert found["measured_tokens_per_s"] == 30.0 and found["error"] == 0.1
    assert (found["measured_ratio"], found["planned_ratio"], found["ratio_error"]) == (2.0, 3.0, 0.5)


def test_the_parts_of_a_round_are_shares_of_all_passes(bench: dict[str, ModuleType]) -> None:
    one = RequestStats(num_new_tokens=9, target_passes=4, target_busy_s=0.04, waited_s=0.004, wall_s=0.06)
    other = RequestStats(num_new_tokens=5, target_passes=2, target_busy_s=0.02, wall_s=0.03, prefill_s=0.006)
    one.drafter_passes, one.drafter_busy_s, one.schedule = 12, 0.024, "beside"
    parts = bench["validation_report"].parts_of([one, other])
    assert parts["pass_ms"] == 10.0 and parts["tokens_per_pass"] == 2.0
    assert parts["waited_ms"] == pytest.approx(4 / 6, abs=1e-3)
    assert parts["overhead_ms"] == pytest.approx(20 / 6, abs=1e-3)  # of 84 ms, 60 were passes and 4 waiting
    assert parts["drafter_passes_per_pass"] == 2.0 and parts["drafter_pass_ms"] == 2.0
    assert parts["schedules"] == {"beside": 1, "off": 1}


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("vanilla", {"policy": "fixed", "threads": 1}),
        (BASELINE, {"policy": "fixed", "threads": 2}),
        ("sps-all-cores", {"policy": "fixed", "threads": 2, "placement": "inline", "num_speculative_tokens": 6}),
        ("pearl", {"policy": "fixed", "threads": 1, "placement": "process"}),
        (
            "card-best-first",
            {"policy": "fixed", "threads": 1, "placement": "process", "verify": "tree", "growth": "best-first"},
        ),
        ("card", {}),
        ("card-writers", {"writers": ("beam", "suffix", "recycling")}),
    ],
)
def test_the_planner_is_told_of_a_row_what_card_bench_sets(
    bench: dict[str, ModuleType], name: str, planned: dict[str, Any]
) -> None:
    settings = LineupSettings(params=SamplingParams(temperature=0.0, seed=0).resolved(), cores=(0, 1), lengths=(6,))
    assert bench["planner_validation"].planned_settings(name, settings) == planned


def test_what_makes_no_sense_is_refused(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none.jsonl"
    options = ["--prompts", str(tmp_path / "none"), "--out", str(out)]
    assert bench["planner_validation"].main([*options, "--repeats", "0"]) == 2
    assert bench["planner_validation"].main([*options, "--rows", "magic"]) == 2
    captured = capsys.readouterr().err
    assert "--repeats and --limit must be 1 or more" in captured and "unknown method 'magic'" in captured
    assert bench["plot_validation"].main([str(out), "--out", str(tmp_path / "none.png")]) == 2
    assert bench["validation_report"].main([str(out)]) == 2
    assert "validation_report.py: error:" in capsys.readouterr().err
    assert not out.exists() and not (tmp_path / "none.png").exists()
