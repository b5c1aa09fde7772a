"""Waiting for what other threads and processes must come to."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0  # for what takes seconds on an idle machine: only a hung one takes so long


def until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, complaint: Callable[[], str] | None = None
) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, complaint() if complaint else "it never happened"
        time.sleep(0.005)
