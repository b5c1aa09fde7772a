"""Memory and processor time that this process may use, by the control groups of Linux.

Both versions are read, also side by side. The groups that this process is in are walked from its own up to the
outermost one that it can see; the least limit holds.
Source: Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst and scheduler/sched-bwc.rst of Linux.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

SYSTEM = Path("/")  # where /proc and /sys are looked for
_NO_LIMIT = 1 << 60  # version 1 says "none" by a number beyond all memory
_OCTAL = re.compile(r"\\([0-7]{3})")  # of a space in a path, and similar characters


@dataclass(frozen=True, slots=True)
class _Group:
    folder: Path
    version: Literal[1, 2]


def memory_left(root: Path = SYSTEM) -> int | None:
    """Return the bytes that this process may still take by its groups; None if they set no limit.

    Files that are cached count as free: the system drops them before it ends a process. Those that are mapped do not,
    as the weights of a model may be among them.
    """
    left = [limit - _used(group) for group in _groups("memory", root) if (limit := _memory_limit(group)) is not None]
    return max(0, min(left)) if left else None


def memory_limit(root: Path = SYSTEM) -> int | None:
    """Return the most bytes that this process may have by its groups; None if they set no limit."""
    limits = [limit for group in _groups("memory", root) if (limit := _memory_limit(group)) is not None]
    return min(limits, default=None)


def num_usable_cores(root: Path = SYSTEM) -> int:
    """Return how many threads of this process can compute all the time, 1 or more.

    A quota of one and a half cores gives one. A second thread would be stopped for half of each period, in the middle
    of a pass that the first one then waits for; and the half is not lost, since the server's own work needs it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cpu_quota(root: Path = SYSTEM) -> float | None:
    """Return how many cores' time the groups of this process give it; None if they set no limit."""
    return min((quota for group in _groups("cpu", root) if (quota := _quota(group)) is not None), default=None)


def _memory_limit(group: _Group) -> int | None:
    """Return a group's own limit. One that slows down (memory.high) is one too."""
    names = ("memory.limit_in_bytes",) if group.version == 1 else ("memory.max", "memory.high")
    bounds = [_number(group.folder / name) for name in names]
    if group.version == 1:
        bounds.append(_numbers(group.folder / "memory.stat").get("hierarchical_memory_limit"))  # of those out of sight
    return min((limit for limit in bounds if limit is not None and limit < _NO_LIMIT), default=None)


def _used(group: _Group) -> int:
    used = _number(group.folder / ("memory.usage_in_bytes" if group.version == 1 else "memory.current")) or 0
    facts = _numbers(group.folder / "memory.stat")
    prefix, mapped = ("total_", "total_mapped_file") if group.version == 1 else ("", "file_mapped")
    cached = facts.get(f"{prefix}inactive_file", 0) + facts.get(f"{prefix}active_file", 0)
    return used - max(0, cached - facts.get(mapped, 0))


def _quota(group: _Group) -> float | None:
    """Return how many cores' time a group has; None: no limit."""
    if group.version == 1:
        quota, period = (_number(group.folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    else:
        words = [*_text(group.folder / "cpu.max").split(), "", ""]
        quota, period = (int(word) if word.isdigit() else None for word in words[:2])
    return quota / period if quota is not None and quota > 0 and period else None


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    """Yield the groups of this process that may limit something, its own first, of both versions."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        version: Literal[1, 2] = 2 if number == "0" and not names else 1
        if version == 1 and controller not in names.split(","):
            continue
        for mount in mounts:
            if mount.version == version and (version == 2 or controller in mount.controllers):
                yield from (_Group(folder, version) for folder in _folders(mount, path, root))
                break


@dataclass(frozen=True, slots=True)
class _Mount:
    version: Literal[1, 2]
    top: PurePosixPath  # the group that is seen at its place
    place: PurePosixPath
    controllers: frozenset[str]


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, kind = line.partition(" - ")
        words, about = fields.split(" "), kind.split(" ")
        if len(words) < 6 or len(about) < 3 or about[0] not in ("cgroup", "cgroup2"):
            continue
        top, place = (PurePosixPath(_OCTAL.sub(lambda escape: chr(int(escape[1], 8)), word)) for word in words[3:5])
        yield _Mount(2 if about[0] == "cgroup2" else 1, top, place, frozenset(about[2].split(",")))


def _folders(mount: _Mount, path: str, root: Path) -> Iterator[Path]:
    """Yield the folders from a group up to the mount that it is seen by.

    A container that has the system's names of groups, but only its own mounted, finds that at the mount itself.
    """
    place, group = root / str(mount.place).lstrip("/"), PurePosixPath(path)
    if group.is_relative_to(mount.top) and ".." not in group.parts:
        below = group.relative_to(mount.top)
        yield from (place / one for one in (below, *below.parents) if one.parts)
    yield place


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text("utf-8", errors="replace")
    return ""


def _number(file: Path) -> int | None:
    """Return what a file says; None for "max", a negative number, and no such file."""
    word = _text(file).strip()
    return int(word) if word.isdigit() else None


def _numbers(file: Path) -> Mapping[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
