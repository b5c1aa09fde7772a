"""Memory of this process: how much it may still take, and what it has freed, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

from card.machine.container import SYSTEM, memory_left, memory_limit

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_KIB = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def give_back_memory() -> None:
    """Give back freed memory that the C library keeps for later; one that is not glibc keeps what it keeps.

    Packing weights, compiling and reading a tokenizer free much between what stays, which holds the rest.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_memory(root: Path = SYSTEM) -> int:
    """Return the bytes that this process may still take: by the machine, by its container, and by its own limit."""
    own = _kib_of(root / "proc/self/status")
    bounds = [_free_on_machine(root, own.get("RssFile", 0)), memory_left(root)]
    if resource is not None:
        most = resource.getrlimit(resource.RLIMIT_AS)[0]  # of addresses, which what is mapped takes too
        bounds.append(None if most == resource.RLIM_INFINITY else most - own.get("VmSize", 0))
    return max(0, min(bound for bound in bounds if bound is not None))


def whole_memory(root: Path = SYSTEM) -> int:
    """Return the bytes that this process could have at most: the machine's, or those of its container."""
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(of_machine, memory_limit(root) or of_machine)


def _free_on_machine(root: Path, mapped: int) -> int:
    """Return what the machine has left.

    The system's own estimate counts cached files as free. Those that this process has mapped are not: among them are
    the weights that every pass reads.
    """
    available = _kib_of(root / "proc/meminfo").get("MemAvailable")
    if available is None:  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available - mapped


def _kib_of(file: Path) -> dict[str, int]:
    """Return the sizes that a file of the system names, in bytes."""
    with contextlib.suppress(OSError):
        return {name: int(size) << 10 for name, size in _KIB.findall(file.read_text("ascii", errors="replace"))}
    return {}
