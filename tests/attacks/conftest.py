"""Every attack books what it sent and what came of it; the run ends with a table of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_BOOKED: list[tuple[str, int, str]] = []

Book = Callable[[str, int, str], None]
"""Takes the attack in words, how many times it was tried, and the result in words."""


@pytest.fixture(scope="session")
def book() -> Book:
    """Books an attack for the table."""

    def add(attack: str, count: int, result: str) -> None:
        _BOOKED.append((attack, count, result))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    if not _BOOKED:
        return
    terminalreporter.write_sep("=", "attacks")
    terminalreporter.write_line("| attack | count | result |\n| --- | ---: | --- |")
    for attack, count, result in _BOOKED:
        terminalreporter.write_line(f"| {attack} | {count:,} | {result} |")
