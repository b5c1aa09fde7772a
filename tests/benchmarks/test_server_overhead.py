"""What the server costs beyond the engine: both ways write the same texts, and the line says what it took."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.pair import Pair

pytestmark = pytest.mark.timeout(240)


def test_both_ways_write_the_same_texts_and_the_overhead_is_their_ratio(
    bench: dict[str, ModuleType], pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "overhead.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"how many cats sat, {i}?"}) + "\n" for i in range(5)))
    options = ["--target", pair.target, "--method", "vanilla", "--dtype", "float32", "--max-tokens", "20"]
    options += ["--limit", "5", "--concurrency", "4", "--repeats", "2"]
    assert bench["server_overhead"].main(["--prompts", str(prompts), "--out", str(out), *options]) == 0
    assert capsys.readouterr().out.startswith("0 of 5 texts differ")
    (line,) = (json.loads(one) for one in out.read_text().splitlines())
    assert line["num_texts_differing"] == 0
    assert line["new_tokens"] == 5 * 20
    direct, http = sorted(line["wall_s"]["direct"]), sorted(line["wall_s"]["http"])
    assert len(direct) == len(http) == len(line["client_cpu_s"]) == 2
    assert line["overhead"] == pytest.approx(sum(http) / sum(direct) - 1, abs=1e-3)
