"""The command, run inside the test process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_command
from tests.tools.verify_server.fake import AT_ONCE

KEY_VARIABLES = ("CARD_API_KEY", "CARD_REFERENCE_API_KEY")


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run gave, and its report."""

    status: int
    out: str
    err: str
    report: dict[str, Any]  # empty if there is none

    def outcome(self, name: str) -> str:
        """Return how a check ended."""
        return str(self.result(name)["outcome"])

    def result(self, name: str) -> dict[str, Any]:
        """Return what a check found."""
        return next(one for one in self.report["results"] if one["name"] == name)


Verify = Callable[..., Ran]


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Verify:
    """Run `card verify-server` with these arguments."""
    for name in (*KEY_VARIABLES, "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> Ran:
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        limits = ["--limit", str(AT_ONCE), "--concurrency", str(AT_ONCE), "--json", str(path)]
        ran = run_command(capsys, "verify-server", *limits, *args)
        report = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return Ran(ran.status, ran.out, ran.err, report)

    return run
