"""A place that cannot be written is one line and status 2, before a tool loads or measures anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_outputs import assert_refused, place

__all__ = ["place"]  # a fixture
_WORK = (
    *("tools.bench.command.run_bench", "tools.bench.command.read_plan"),
    *("tools.bench.report.command.load", "tools.planner.command.measure_profile"),
    *("tools.planner.command.read_datasets", "tools.planner.command.record_pair"),
)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--out"),
        ("bench", "--trace"),
        ("profile", "demo-target", "--out"),
        ("record", "--out"),
        ("report", "RESULTS", "--out"),
        ("report", "RESULTS", "--csv"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_one_line_before_any_work(
    arguments: tuple[str, ...], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    assert_refused((*arguments, str(place)), tmp_path, monkeypatch, capsys, _WORK)
    assert sorted(tmp_path.rglob("*")) == [*before, tmp_path / "results"]
