"""Groups of cores on made-up machines, and the numbers of threads that are found with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from card.machine.core_groups import CoreGroups, core_groups


def written(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", "ascii")


def server(root: Path) -> int:
    """Two nodes of four caches of eight cores, each of two threads."""
    for core in range(128):
        place = root / f"sys/devices/system/cpu/cpu{core}"
        cache = core % 64 // 8
        written(place / "topology/thread_siblings_list", f"{core % 64},{core % 64 + 64}")
        written(
            place / "cache/index3/shared_cpu_list", f"{8 * cache}-{8 * cache + 7},{64 + 8 * cache}-{71 + 8 * cache}"
        )
        (place / f"node{cache // 4}").mkdir()
    return 128


def laptop(root: Path) -> int:
    """Six fast cores of two threads, and eight slow ones."""
    written(root / "sys/devices/cpu_core/cpus", "0-11")
    written(root / "sys/devices/cpu_atom/cpus", "12-19")
    for core in range(20):
        place = root / f"sys/devices/system/cpu/cpu{core}"
        written(place / "topology/thread_siblings_list", f"{core & ~1}-{core | 1}" if core < 12 else str(core))
        written(place / "cache/index3/shared_cpu_list", "0-19")
    return 20


def phone(root: Path) -> int:
    """Four slow cores, three of middle size and a large one, by the capacity that ARM tells."""
    for core, capacity in enumerate([200] * 4 + [700] * 3 + [1024]):
        written(root / f"sys/devices/system/cpu/cpu{core}/cpu_capacity", str(capacity))
    return 8


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (server, CoreGroups(0, (8, 16, 24, 32, 40, 48, 56))),
        (laptop, CoreGroups(6, ())),
        (phone, CoreGroups(1, ())),
        (lambda root: 2, CoreGroups()),
    ],
    ids=["server", "laptop", "phone", "untold"],
)
def test_cores_are_grouped_as_the_system_tells(
    tmp_path: Path, machine: Callable[[Path], int], expected: CoreGroups
) -> None:
    assert core_groups(range(machine(tmp_path)), tmp_path) == expected
    assert core_groups(None, tmp_path) == CoreGroups()


def test_only_cores_that_may_be_used_count(tmp_path: Path) -> None:
    server(tmp_path)
    assert core_groups(range(4, 20), tmp_path) == CoreGroups(0, (8, 12))
    assert core_groups(range(8), tmp_path) == core_groups([], tmp_path) == CoreGroups()
