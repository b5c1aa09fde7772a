"""The scripts about the plug-in, without vLLM: what they write is what their tables show."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_the_table_shows_each_row_against_plain_decoding(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = {
        "benchmark": "vllm_plugin",
        "row": "card",
        "at_once": 4,
        "target": "90M",
        "prompts": "code",
        "num_prompts": 8,
        "tokens_per_s": [100.0, 120.0, 110.0],
        "ratios": [2.0, 2.5, 2.25],
        "tokens_per_step": 10.0,
        "texts_apart": 1,
    }
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    assert bench["vllm_plugin"].main(["--table", str(tmp_path / "lines.jsonl")]) == 0
    assert "| 90M | code | 4 | card | 110 | 2.25 | 2.00–2.50 | 2.50 | 1 of 8 |" in capsys.readouterr().out


def test_every_row_of_vllm_uses_all_cores_in_total(bench: dict[str, ModuleType]):
    rows = bench["vllm_plugin"].make_rows("draft", [3, 5], [0, 1, 2])
    assert [row.name for row in rows] == [
        "plain",
        "ngram",
        "suffix",
        "draft-3",
        "draft-5",
        "card",
        "card in turns",
        "card without a draft",
    ]
    assert rows[5].card["draft_cores"] == [2]
    assert rows[6].card["schedule"] == "turns"
    assert "draft_cores" not in rows[6].card
