"""Groups of physical cores, as Linux tells them: fast ones, those that share a cache, those of a memory node.

Source: Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-devices-system-cpu of Linux.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from card.machine.container import SYSTEM

_NODE = re.compile(r"node(\d+)")


@dataclass(frozen=True, slots=True)
class CoreGroups:
    """Numbers of physical cores."""

    fast: int = 0  # the fast ones; 0 where all are alike
    whole: tuple[int, ...] = ()  # that one, two, ... groups have together, the least first

    def between(self, least: int, most: int) -> int | None:
        """Return the number of whole groups that is nearest to the middle of two; None if none lies between."""
        inside = [count for count in self.whole if least < count < most]
        return min(inside, key=lambda count: abs(2 * count - least - most), default=None)


NO_GROUPS = CoreGroups()


def core_groups(cores: Iterable[int] | None, root: Path = SYSTEM) -> CoreGroups:
    """Return the groups of the physical cores behind those that may be used; none where the system does not tell."""
    if cores is None:
        return NO_GROUPS
    siblings = {core: _read_fact(root, core, "topology/thread_siblings_list") or str(core) for core in cores}
    physical = sorted({name: core for core, name in sorted(siblings.items(), reverse=True)}.values())
    speeds = [_speed(root, core) for core in physical]
    fast = sum(speed == max(speeds) for speed in speeds) if physical else 0
    nodes = [_node(root, core) for core in physical]
    # A cache belongs to a node; cores that tell of no cache share that of their node.
    caches = [_read_fact(root, core, "cache/index3/shared_cpu_list") for core in physical]
    kinds: tuple[list[object], list[object]] = ([*nodes], [*zip(nodes, caches, strict=True)])
    counts = {count for group in kinds for count in accumulate(sorted(Counter(group).values(), reverse=True))}
    return CoreGroups(fast if fast < len(physical) else 0, tuple(sorted(counts - {len(physical)})))


def _speed(root: Path, core: int) -> int:
    """Return what tells a fast core from a slow one; 0 for all where the system does not."""
    if core in _listed(root / "sys/devices/cpu_atom/cpus"):  # Intel's slow ones
        return -1
    capacity = _read_fact(root, core, "cpu_capacity")
    return int(capacity) if capacity.isdecimal() else 0


def _node(root: Path, core: int) -> int:
    with contextlib.suppress(OSError):
        for place in (root / f"sys/devices/system/cpu/cpu{core}").iterdir():
            if node := _NODE.fullmatch(place.name):
                return int(node[1])
    return 0


def _read_fact(root: Path, core: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return (root / f"sys/devices/system/cpu/cpu{core}" / name).read_text("ascii", errors="replace").strip()
    return ""


def _listed(file: Path) -> set[int]:
    """Return the numbers of a list like 0-3,8."""
    with contextlib.suppress(OSError, ValueError):
        parts = [part.split("-") for part in file.read_text("ascii").strip().split(",") if part]
        return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
    return set()
