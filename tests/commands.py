"""The command, run inside the test process."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import pytest

from card.cli.main import main

WIDE = 1000  # columns: no line is broken, whatever the length of the temporary folder whose path it holds


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of the command gave."""

    status: int
    out: str
    err: str


def run_command(capture: pytest.CaptureFixture[str], *args: str, stdin: bytes | None = b"", columns: int = WIDE) -> Ran:
    """Run `card` with these arguments and this standard input, on an output of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        patch.setattr(sys, "argv", ["card", *args])
        capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
    captured = capture.readouterr()
    return Ran(int(ended.value.code or 0), captured.out, captured.err)
