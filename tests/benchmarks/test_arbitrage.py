"""The script of step-wise routing writes a line for each router and knob, and refuses routers that it does not know."""

from __future__ import annotations

import json

import pytest

from card.errors import SettingsError
from tests.benchmarks.scripts import lines_of


def test_a_run_has_a_line_for_each_router_and_knob(bench, pair, tmp_path, monkeypatch, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in (1, 2)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    command = ["arbitrage.py", "--target", pair.target, "--draft", pair.draft, "--prompts", str(prompts)]
    routers = ["--routers", "random:0,random:1,entropy:1,reward:0.3,oracle:1"]
    monkeypatch.setattr("sys.argv", [*command, *routers, "--max-tokens", "8", "--out", str(out)])
    bench["arbitrage"].main()
    lines = lines_of(out)
    assert [(line["router"], line["knob"]) for line in lines][:2] == [("random", 0.0), ("random", 1.0)]
    assert [line["exact"] for line in lines] == [True, False, False, False, False]
    exact, drafted = lines[:2]
    assert exact["num_same_number"] == 2 and exact["draft_tokens"] == 0 and drafted["target_tokens"] == 0
    assert "steps of the target" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["magic:1", "random:2", "entropy:x"])
def test_routers_that_cannot_be_are_refused(bench, text):
    with pytest.raises(SettingsError):
        bench["arbitrage"].parse(text)
