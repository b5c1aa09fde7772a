"""Whether a moment was quiet, by what the system tells of threads and cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from card.machine.quiet import CoreWatch
from card.machine.threads import usable_cores

CORE = (usable_cores() or (0,))[0]
TICKS = os.sysconf("SC_CLK_TCK")


def spend(root: Path, threads: dict[str, tuple[float, float]], stolen_s: float = 0.0, core: int = CORE) -> None:
    """Write what the system tells by now: seconds that each thread ran and waited, and those that a core was gone."""
    for name, (ran_s, waited_s) in threads.items():
        folder = root / "proc/self/task" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 7\n")
    ticks = int(stolen_s * TICKS)
    (root / "proc/stat").write_text(f"cpu  9 9 9 9 9 9 9 {ticks} 0 0\ncpu{core} 9 9 9 9 9 9 9 {ticks} 0 0\nintr 3\n")


@pytest.mark.parametrize(
    ("main", "other", "is_quiet"),
    [
        ((1.0, 0.01), (0.7, 0.01), True),
        ((1.0, 0.0), (0.5, 0.5), False),  # passes wait for the slower of their threads
        ((0.1, 0.9), (0.1, 0.9), False),
        ((0.03, 0.005), (0.03, 0.0), True),  # somebody was let in once
        ((0.03, 0.015), (0.03, 0.0), False),
        ((1.0, 0.0), (0.01, 0.02), True),  # one that hardly wanted a core is none of those that passes wait for
    ],
)
def test_a_moment_is_quiet_where_no_busy_thread_waited_for_a_core(
    tmp_path: Path, main: tuple[float, float], other: tuple[float, float], is_quiet: bool
) -> None:
    spend(tmp_path, {"1": (5.0, 5.0), "2": (0.0, 9.0)})
    watch = CoreWatch(tmp_path)
    spend(tmp_path, {"1": (5.0 + main[0], 5.0 + main[1]), "2": (other[0], 9.0 + other[1])})
    assert watch.was_quiet() is is_quiet


def test_a_thread_that_began_meanwhile_counts(tmp_path: Path) -> None:
    spend(tmp_path, {"1": (0.0, 0.0)})
    watch = CoreWatch(tmp_path)
    spend(tmp_path, {"1": (1.0, 0.0), "2": (0.5, 0.5)})
    assert watch.was_quiet() is False


@pytest.mark.parametrize(
    ("stolen_s", "is_ours", "is_quiet"), [(0.5, True, False), (0.05, True, True), (0.5, False, True)]
)
def test_a_core_that_the_machine_below_took_was_not_ours(
    tmp_path: Path, stolen_s: float, is_ours: bool, is_quiet: bool
) -> None:
    core = CORE if is_ours else 4095
    spend(tmp_path, {"1": (0.0, 0.0)}, core=core)
    watch = CoreWatch(tmp_path)
    spend(tmp_path, {"1": (1.0, 0.0)}, stolen_s, core)
    assert watch.was_quiet() is is_quiet


def test_a_system_that_tells_nothing_leaves_it_open(tmp_path: Path) -> None:
    watch = CoreWatch(tmp_path)
    assert watch.was_quiet() is None
    spend(tmp_path, {"1": (0.0, 0.0)})
    assert watch.was_quiet() is None, "nothing ran, by what it tells"
