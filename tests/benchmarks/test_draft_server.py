"""A draft server, next door and at a distance, leaves the text as it is; what it costs makes a table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from card.errors import WorkerError
from card.tools.bench.results import load
from card.tools.bench.summary import summarise
from tests.pair import Pair


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_draft_server_changes_the_speed_and_no_text(
    bench: dict[str, ModuleType],
    pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "draft_server.jsonl"
    prompts.write_text(json.dumps({"question": "how many cats sat?"}) + "\n")
    options = ["--prompts", str(prompts), "--limit", "1", "--target", pair.target, "--draft", pair.draft]
    options += ["--dtype", "float32", "--max-tokens", "120", "--repeats", "2", "--delays-ms", "0.5", "--out", str(out)]
    assert bench["draft_server"].main(options) == 0
    (run,) = load(out)
    rows = {summary.row: summary for summary in summarise(run)}
    assert list(rows) == ["vanilla", "turns", "fixed, 0.5 ms away", "default, 0.5 ms away"]
    settings = {one.row: one.settings for one in run.chosen}
    for name, row in rows.items():
        check = run.check_of((row.pair, name, "prompts"))
        assert check is not None and check.num_equal == check.num_texts == 2 and row.tokens_per_s.median > 0
        assert row.costs.drafter_restarts in (None, 0)
        assert settings[name]["cores"] == [min(os.sched_getaffinity(0))]  # none has the server's core for its target
    assert rows["fixed, 0.5 ms away"].costs.drafter_layers_per_s  # the server has drafted
    assert settings["fixed, 0.5 ms away"]["placement"] == "server"
    assert "0.5 ms away" in capsys.readouterr().out


def test_a_server_that_does_not_come_up_is_an_error_and_not_a_hang(bench: dict[str, ModuleType]) -> None:
    with (
        pytest.raises(WorkerError, match="process with one did not come up"),
        bench["draft_server"].serving("import sys; sys.exit(3)", ["one"], min(os.sched_getaffinity(0))),
    ):
        pass
