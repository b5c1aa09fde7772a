"""Starts as users type them, and chats over HTTP: every row is there, and all of them write the same text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.scripts import lines_of
from tests.pair import Pair

pytestmark = pytest.mark.timeout(240)


def test_only_the_first_start_of_the_busy_kind_has_company_and_rows_alternate(bench: dict[str, ModuleType]) -> None:
    starts = bench["starts"].starts_of(2)
    assert [one.name for one in starts if one.is_beside_busy] == ["busy, start 1"]
    assert {one.name for one in starts} == {
        *(f"{kind}, start {number}" for kind in ("fresh", "busy") for number in (1, 2, 3)),
        *("--threads 1", "--threads 2"),
    }
    assert all(first.kind != second.kind for first, second in itertools.pairwise(starts))


def test_busy_processes_end_with_their_block(bench: dict[str, ModuleType]) -> None:
    with pytest.raises(RuntimeError, match="stop"), bench["starts"].busy_cores(1) as burners:
        raise RuntimeError("stop")
    assert all(burner.poll() is not None for burner in burners)


def test_the_table_gives_each_starts_share_of_the_best_number_of_threads(bench: dict[str, ModuleType]) -> None:
    rates = {"fresh, start 2": 90.0, "--threads 1": 50.0, "--threads 2": 100.0}
    common = {"pair": "a+b", "method": "card", "threads": 2, "same_text": True}
    shown = bench["starts"].table([{**common, "row": row, "tokens_per_s": rate} for row, rate in rates.items()])
    assert "0 of 3 starts wrote another text" in shown and "| fresh, start 2 | 90 | 2 | 0.90 |" in shown


def test_all_ways_to_serve_write_the_same_texts(bench: dict[str, ModuleType], pair: Pair, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "served.jsonl"
    prompts.write_text(json.dumps({"question": "how many cats sat?"}) + "\n")
    options = ["--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--prompts", f"cats={prompts}"]
    options += ["--limit", "2", "--concurrency", "2", "--max-tokens", "8", "--rounds", "1", "--repeats", "1"]
    assert bench["served"].main([*options, "--out", str(out)]) == 0
    lines = lines_of(out)
    assert [line["num_texts_differing"] for line in lines] == [0, 0, 0]
    assert lines[-1]["server"] == "card serve" and all(len(line["tokens_per_s_runs"]) == 1 for line in lines)
