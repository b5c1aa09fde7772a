"""Commands keep to what their container allows, and outlive whoever reads their logs."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from card.cli.parts import starting
from card.cli.parts.command import StderrHandler


@pytest.mark.parametrize(("quota", "set_before", "threads"), [(1.5, None, "1"), (1.5, "7", "7"), (None, None, None)])
def test_libraries_start_no_more_threads_than_the_quota_has_time_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quota: float | None,
    set_before: str | None,
    threads: str | None,
) -> None:
    (tmp_path / "seen_at_import.py").write_text("import os; THREADS = os.environ.get('OMP_NUM_THREADS')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(starting, "cpu_quota", lambda: quota)
    monkeypatch.setattr(starting, "num_usable_cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", set_before or "")
    if set_before is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        seen = starting.load("seen_at_import").THREADS
        assert seen == threads
    finally:
        sys.modules.pop("seen_at_import", None)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed file")]
)
def test_a_line_that_cannot_be_written_ends_no_command(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("card.cli.parts.command.click.echo", fail)
    StderrHandler().handle(logging.LogRecord("card", logging.WARNING, "", 0, "words", None, None))
