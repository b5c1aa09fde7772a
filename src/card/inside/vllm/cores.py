"""CPU cores that vLLM leaves to the drafter."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

# Variables of the OpenMP libraries, which vLLM or its user sets, and the cores in their values.
_BINDINGS = (
    ("KMP_AFFINITY", re.compile(r"proclist=\[([\d,]+)\]")),
    ("OMP_PLACES", re.compile(r"^\{([\d,]+)\}$")),
    ("GOMP_CPU_AFFINITY", re.compile(r"^([\d ]+)$")),
)
_USABLE = Path("/sys/fs/cgroup/cpuset.cpus.effective")


def bound_cores(environment: Mapping[str, str]) -> frozenset[int]:
    """Return the cores to which vLLM's CPU backend has bound this process's threads; empty if unknown."""
    for name, pattern in _BINDINGS:
        match = pattern.search(environment.get(name, ""))
        if match:
            return frozenset(int(number) for number in re.split(r"[ ,]+", match[1].strip()))
    return frozenset()


def free_cores(environment: Mapping[str, str], usable: frozenset[int], count: int) -> tuple[int, ...]:
    """Return up to ``count`` usable cores on which vLLM does not compute, the last ones first.

    Empty if nothing is bound, as on a GPU; then the system decides.
    """
    bound = bound_cores(environment)
    free = sorted(usable - bound, reverse=True) if bound else []
    return tuple(sorted(free[:count]))


def usable_cores() -> frozenset[int]:
    """Return the cores that the container may use; vLLM has restricted this process to fewer."""
    try:
        listed = _USABLE.read_text("ascii").strip()
    except OSError:
        listed = ""
    if not listed:
        return frozenset(range(os.cpu_count() or 1))
    cores: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
