"""The script that counts what drafts earn has a line for each row, and texts that are plain decoding's."""

from __future__ import annotations

import sys

from tests.benchmarks.scripts import lines_of
from tests.trainings import write_lines


def test_a_run_has_a_line_for_each_draft_with_what_it_had_right(bench, tmp_path, monkeypatch):
    rows = [{"question": "Tom has 3 apples and buys 4. How many has he?"}]
    asked = [one for name in ("a", "b") for one in ("--prompts", write_lines(tmp_path / f"{name}.jsonl", rows))]
    args = ["--draft", "demo-draft", *asked, "--max-tokens", "12", "--out", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr(sys, "argv", ["eagle.py", *args])
    bench["eagle"].main()
    lines = lines_of(tmp_path / "out.jsonl")
    assert [line["row"] for line in lines] == ["plain", "plain", "suffix", "suffix", "demo-draft", "demo-draft"]
    for one, other in zip(lines[::2], lines[1::2], strict=True):
        assert {**one, "data": "b"} == other
    plain, _, draft = lines[::2]
    assert (plain["steps"], plain["tokens a step"], set(plain["accepted to depth"])) == (11, 1.0, {0.0})
    assert draft["tokens a step"] > 2 and draft["steps"] < plain["steps"]
    assert draft["tokens a step"] >= 1 + sum(draft["accepted to depth"]) - 0.01
    assert sorted(draft["accepted to depth"], reverse=True) == draft["accepted to depth"]
