"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from card.machine.memory import give_back_memory


def held_mib() -> float:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) / 256


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_below_what_stays_goes_back() -> None:
    parts = [bytes(4000) for _ in range(20000)]
    stays = parts[::100]
    before = held_mib()
    parts.clear()
    assert held_mib() > before - 20, "the C library keeps it"
    give_back_memory()
    assert held_mib() < before - 40
    assert all(len(one) == 4000 for one in stays)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("card.machine.memory.ctypes.CDLL", lambda name: object())
    give_back_memory()
