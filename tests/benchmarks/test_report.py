"""The figures of a row are sums over its runs, and the picture and the tables show those of the lines."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from card.metrics import RequestStats

MACHINE = {"cpu": "a CPU", "cores": 2, "load_average": 0.1}


def decoded(bench: dict[str, ModuleType], stats: RequestStats, *, num_tokens: int) -> Any:
    return bench["rows"].Decoded(tuple(range(num_tokens + 1)), num_tokens, 1.0, 2.0, 1.0, stats.target_passes, stats)


def test_what_candidates_cost_is_summed_over_all_runs(bench: dict[str, ModuleType]) -> None:
    one = RequestStats(
        target_passes=4,
        verified_tokens=20,
        accepted_tokens=6,
        accepted_per_depth=[4, 2],
        offered_per_depth=[4, 4, 2],
        verified_by_writer={"beam": 15, "suffix": 5},
        accepted_by_writer={"beam": 4, "beam+suffix": 2},
        hits=2,
        late_hits=1,
        misses=1,
        drafter_passes=30,
        drafter_busy_s=0.5,
        drafter_dropped_nodes=50,
    )
    other = RequestStats(
        target_passes=6,
        verified_tokens=10,
        accepted_tokens=4,
        accepted_per_depth=[4],
        offered_per_depth=[6],
        hits=2,
        drafter_passes=10,
        drafter_busy_s=0.5,
        drafter_dropped_nodes=10,
        drafter_restarts=1,
    )
    fields = bench["report"].cost_fields([decoded(bench, one, num_tokens=10), decoded(bench, other, num_tokens=10)])
    assert fields["target_passes"] == 10 and fields["drafter_passes"] == 40
    assert fields["verified_per_emitted"] == 1.5 and fields["rolled_back_per_emitted"] == 3.0
    assert fields["mean_acceptance_length"] == 2.0 and fields["acceptance_rate"] == pytest.approx(1 / 3, abs=1e-4)
    assert fields["acceptance_per_depth"] == [0.8, 0.5, 0.0]
    assert fields["accepted_by_writer"] == {"beam": 0.8, "beam+suffix": 0.2}  # nobody is named where one can propose
    assert fields["hit_rate"] == 0.5 and (fields["hits"], fields["late_hits"], fields["misses"]) == (4, 1, 1)
    assert fields["drafter_layers_per_s"] == 40.0 and fields["drafter_restarts"] == 1
    assert fields["ceiling_share"] == 0.25  # 10 tokens/s of 40 layers/s


def test_what_a_method_does_not_have_is_none(bench: dict[str, ModuleType]) -> None:
    plain = bench["report"].cost_fields([decoded(bench, RequestStats(target_passes=10), num_tokens=10)])
    assert plain["mean_acceptance_length"] == 1.0 and plain["target_pass_ms"] == 0.0
    for name in ("hit_rate", "verified_per_emitted", "acceptance_per_depth", "accepted_by_writer", "drafter_passes"):
        assert plain[name] is None
    alone = RequestStats(
        target_passes=5,
        verified_tokens=10,
        accepted_tokens=5,
        accepted_per_depth=[5],
        offered_per_depth=[5],
        accepted_by_writer={"suffix": 5},
    )
    fields = bench["report"].cost_fields([decoded(bench, alone, num_tokens=10)])
    assert fields["accepted_by_writer"] == {"suffix": 1.0} and fields["verified_per_emitted"] == 1.0
    assert fields["hit_rate"] is fields["rolled_back_per_emitted"] is fields["ceiling_share"] is None


def line(workload: str, method: str, rates: list[float], **changes: Any) -> dict[str, Any]:
    """Return what `plot.py` reads of a line."""
    run = {"started": "2026-01-01T00:00:00Z", "command": "python benchmarks/methods.py", "commit": "0123456789abcdef"}
    same = {"num_prompts": 3, "repeats": len(rates), "temperature": 0.0, "dtype": "bfloat16", "target_cost": "91M (x)"}
    own = {"benchmark": "methods", "workload": workload, "method": method, "decode_tokens_per_s_runs": rates}
    return {**own, **same, **run, "machine": MACHINE, **changes}


LINES = [
    line("gsm8k", "vanilla-all-cores", [100.0, 110.0, 90.0]),
    line("gsm8k", "slow", [50.0, 110.0, 81.0]),
    line("gsm8k", "fast", [300.0, 220.0, 180.0]),
    line("code", "vanilla-all-cores", [100.0]),
    line("code", "fast", [90.0]),
    line("poems", "fast", [70.0]),
]


def test_a_point_is_the_ratio_to_plain_decoding_repeat_by_repeat(bench: dict[str, ModuleType]) -> None:
    plot = bench["plot"]
    found = plot.points(LINES)
    assert found == {
        "gsm8k": {"slow": plot.Point(0.9, 0.5, 1.0), "fast": plot.Point(2.0, 2.0, 3.0)},
        "code": {"fast": plot.Point(0.9, 0.9, 0.9)},
    }
    assert plot.by_speed(found) == ["slow", "fast"]  # 0.9 against the geometric mean of 2.0 and 0.9


def test_the_picture_is_a_png_of_a_phone_s_width_with_a_row_per_method(
    bench: dict[str, ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "lines.jsonl", tmp_path / "images" / "methods.png"
    path.write_text("".join(json.dumps(one) + "\n" for one in LINES))
    heights = []
    for options in ([], ["--methods", "fast"]):
        assert bench["plot"].main([str(path), "--out", str(out), *options]) == 0
        data = out.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(data[16:20], "big") == 1280
        heights.append(int.from_bytes(data[20:24], "big"))
    assert heights[0] > heights[1] > 0


@pytest.mark.parametrize("text", ["", "{}\n", json.dumps(LINES[0]) + "\n"])
def test_a_file_with_nothing_to_draw_is_refused(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    assert bench["plot"].main([str(path), "--out", str(tmp_path / "none.png")]) == 2
    assert "plot.py: error:" in capsys.readouterr().err and not (tmp_path / "none.png").exists()


def test_tables_compare_workloads_and_tell_whether_several_writers_lose_to_one(
    bench: dict[str, ModuleType],
) -> None:
    common = {
        "outputs_equal": True,
        "decode_tokens_per_s": 1.0,
        "range": [1.0, 1.0],
        "settings": {},
        "first_differences": [],
        **dict.fromkeys(("speedup_same_core", "mean_acceptance_length", "hit_rate", "drafter_layers_per_s")),
        **dict.fromkeys(("ceiling_share", "target_pass_ms", "round_overhead_ms", "verified_per_emitted")),
    }

    def row(workload: str, method: str, ratio: float | None, writers: dict[str, float] | None = None) -> dict[str, Any]:
        return line(workload, method, [1.0], speedup_all_cores=ratio, vs_single_writers=writers, **common)

    rows = [
        row("gsm8k", "card", 2.5),
        row("gsm8k", "card-writers", 2.45, {"card": 0.98, "suffix-all-cores": 2.0}),
        row("code", "card", 0.8),
        row("code", "card-writers", 0.9, {"card": 1.1, "suffix-all-cores": 0.95}),
        row("code", "lookup-all-cores", None),
    ]
    text = bench["table"].methods_tables(rows)
    assert "| method | gsm8k | code |" in text
    assert "| card | **2.50** | 0.80 |" in text and "| card-writers | 2.45 | **0.90** |" in text
    assert "| lookup-all-cores | – | – |" in text
    assert "| workload | / card | / suffix-all-cores | / the best of them |" in text
    assert "| gsm8k | 0.98 | 2.00 | 0.98 |" in text and "| code | 1.10 | 0.95 | 0.95 |" in text
