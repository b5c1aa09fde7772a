"""The methods of rounds at equal draft lengths: what each rolls back makes a table, and no text is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.pair import Pair


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_rows_of_one_length_write_the_same_text_and_what_they_rolled_back_is_shown(
    bench: dict[str, ModuleType], pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rollback.jsonl"
    prompts.write_text(json.dumps({"question": "how many cats sat?"}) + "\n")
    options = ["--prompts", str(prompts), "--limit", "1", "--target", pair.target, "--draft", pair.draft]
    options += ["--dtype", "float32", "--max-tokens", "30", "--lengths", "4", "--hrad", "off"]
    assert bench["rollback"].main([*options, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["pearl", "ssd", "specbranch"]
    for line in lines:
        assert (line["num_speculative_tokens"], line["num_prompts"], line["num_texts_equal"]) == (4, 1, 1)
        assert 0.0 <= line["rolled_back_share"] <= 1.0
        assert line["dropped_nodes"] >= line["rolled_back_tokens"] > 0
    assert lines[0]["dropped_nodes"] == lines[0]["rolled_back_tokens"], "a chain has no side branches"
    assert capsys.readouterr().out.count("specbranch") == 1
