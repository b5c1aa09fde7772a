"""The script about pools on Ray Serve, without Ray: what it writes is what its table shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_the_table_shows_what_was_measured_beside_what_was_planned(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {
        "benchmark": "ray_pool",
        "targets": 2,
        "drafters": 1,
        "requests": 24,
        "tokens_per_s": 150.0,
        "plain_tokens_per_s": 100.0,
        "planned_tokens_per_s": 240.0,
        "planned_plain_tokens_per_s": 120.0,
        "texts_apart": 0,
        "machine": {"cores": 2},
    }
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    assert bench["ray_pool"].main(["--table", str(tmp_path / "lines.jsonl")]) == 0
    assert "| 2 | 1 | 2 | 150 (1.50x) | 240 (2.00x) | 100 | 120 | 0 of 48 |" in capsys.readouterr().out
