"""The command, run inside the test process."""

from __future__ import annotations

import io
import sys
import tempfile
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


def exit_status(*args: str, stdin: bytes | None = b"", columns: int = WIDE) -> int:
    """Run `card` with these arguments and this standard input, on an output of so many columns."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as typed:
        patch.setenv("COLUMNS", str(columns))
        typed.write(stdin or b"")
        typed.seek(0)
        patch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(typed, encoding="utf-8"))
        patch.setattr(sys, "argv", ["card", *args])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def run_command(capture: pytest.CaptureFixture[str], *args: str, stdin: bytes | None = b"", columns: int = WIDE) -> Ran:
    """Run `card` as `exit_status` does, and return what it wrote besides."""
    capture.readouterr()
    status = exit_status(*args, stdin=stdin, columns=columns)
    captured = capture.readouterr()
    return Ran(status, captured.out, captured.err)
