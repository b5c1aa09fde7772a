"""The rounds of a target and the steps of a drafter are profiled part by part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.scripts import lines_of
from tests.pair import Pair


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_rounds_and_beam_steps_are_profiled_part_by_part(
    bench: dict[str, ModuleType], pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "profile.jsonl"
    prompts.write_text(json.dumps({"question": "how many cats sat?"}) + "\n")
    options = ["--prompts", str(prompts), "--limit", "1", "--target", pair.target, "--draft", pair.draft]
    options += ["--max-tokens", "30", "--beam-widths", "2,4", "--out", str(out)]
    assert bench["profile_rounds"].main(options) == 0
    lines = {line["what"]: line for line in lines_of(out)}
    assert list(lines) == [
        "plain round",
        "card round, chain",
        "card round, tree",
        "beam step, width 2",
        "beam step, width 4",
        "drafter's commit, width 4",
    ]
    for line in lines.values():
        assert line["num_rounds"] > 0 and 0 < line["overhead_us"] <= line["total_us"]
        assert "rest" in line["parts"]
    assert lines["card round, tree"]["parts"]["query"] > 0 and lines["beam step, width 4"]["parts"]["grow the tree"] > 0
    capsys.readouterr()
    assert bench["table"].main([str(out)]) == 0
    assert "beam step, width 4" in capsys.readouterr().out
