"""Memory of this process: how much it may still take, and what it has freed, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
from pathlib import Path

from card.errors import CardError
from card.machine.container import SYSTEM, memory_left, memory_limit
from card.machine.sysctl import system_number

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# How the system, torch, LLVM and C++ say it; torch has no exception of its own for the CPU.
_WORDS = re.compile(
    r"(can't|cannot|unable to|failed to) (allocate|map segment)|(not enough|out of) memory|bad_alloc", re.IGNORECASE
)
_COMPILER = "libllvmlite.so"
# The first line of a mapping in /proc/self/smaps: start, end, whether it is writable, file.
_PART = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .(.).. [0-9a-f]+ \S+ \d+ *(.*)", re.MULTILINE)
_ALL_AS_READ = f"\nAnonymous:{0:14} kB\n"  # no page of the mapping differs from its file
_LEAST_BYTES = 1 << 29  # with less left, a library that cannot be loaded, or a thread that cannot start, lacked memory
# Pages that macOS can give to a program at once: free, purgeable, and of cached files.
_PAGES_LEFT = ("vm.page_free_count", "vm.page_purgeable_count", "vm.page_pageable_external_count")
_KIB = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def give_back_memory() -> None:
    """Give freed memory that glibc keeps back to the system, and the compiler's code; do nothing on other systems.

    Packing weights, compiling and reading a tokenizer free much between what stays, which holds the rest. Of the
    compiler 45 to 70 MB are in memory though it only had to load code that was kept.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    give_back_pages(_COMPILER)


def give_back_pages(library: str) -> int:
    """Give back the pages of a library, by the name of its file, to which nothing was written since they were read.

    What is used again is read from the file again. Returns: the bytes that were given back.
    """
    return sum(size for first, size in unwritten_parts(library) if _advise(first, size, mmap.MADV_DONTNEED))


def take_large_pages(first: int, size: int) -> bool:
    """Let a part of memory be in pages of 2 MB, where the system has them: what is used as a whole is there sooner.

    Args:
        first: its address, and ``size`` its bytes; pages that it shares with others stay as they are.
    Returns: whether the system does so.
    """
    inside = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (first + size) // mmap.PAGESIZE * mmap.PAGESIZE
    return hasattr(mmap, "MADV_HUGEPAGE") and inside < end and _advise(inside, end - inside, mmap.MADV_HUGEPAGE)


def _advise(first: int, size: int, advice: int) -> bool:
    """Tell the system how whole pages are used; return whether it takes that."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice) == 0)
    return False


def unwritten_parts(library: str, maps: Path = Path("/proc/self/smaps")) -> list[tuple[int, int]]:
    """Return address and size of those mapped parts of a library that equal its file; empty where not on Linux."""
    try:
        parts = _PART.split(maps.read_text("utf-8", errors="replace"))[1:]
    except OSError:
        return []
    ranges = []
    for first, end, may_write, file, facts in zip(*(parts[i::5] for i in range(5)), strict=True):
        if Path(file).name == library and may_write == "-" and _ALL_AS_READ in facts:
            ranges.append((int(first, 16), int(end, 16) - int(first, 16)))
    return ranges


def free_memory(root: Path = SYSTEM) -> int:
    """Return the bytes that this process may still take: the least that machine, container and ulimit leave."""
    used = _kib_of(root / "proc/self/status")
    bounds = [_free_on_machine(root, used.get("RssFile", 0)), memory_left(root)]
    if resource is not None:
        most = resource.getrlimit(resource.RLIMIT_AS)[0]  # of addresses, which what is mapped takes too
        bounds.append(None if most == resource.RLIM_INFINITY else most - used.get("VmSize", 0))
    return max(0, min(bound for bound in bounds if bound is not None))


def is_shortage(error: BaseException | None) -> bool:
    """Return whether an error comes from too little memory, even if it was wrapped in other errors."""
    seen = set[int]()  # a chain of errors may lead back to itself
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if not isinstance(error, CardError) and (_WORDS.search(str(error)) or _has_not_begun(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_not_begun(error: BaseException) -> bool:
    """Return whether a library or a thread could not begin, and memory is what it lacked."""
    return ("shared object" in str(error) or "start new thread" in str(error)) and free_memory() < _LEAST_BYTES


def memory_in_words() -> str:
    """Return how much memory this process may have and what limits it, in words."""
    bounds = [(whole_memory(), "on this machine"), (memory_limit(), "in this container")]
    if resource is not None:
        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        bounds.append((None if most == resource.RLIM_INFINITY else most, "under ulimit -v"))
    least, where = min((bound, where) for bound, where in bounds if bound is not None)
    return f"{in_gigabytes(free_memory())} of {in_gigabytes(least)} {where} were left"


def in_gigabytes(num_bytes: int) -> str:
    """Return a size for users."""
    return f"{num_bytes / 1e9:.2f} GB"


def whole_memory(root: Path = SYSTEM) -> int:
    """Return the bytes that this process could have at most: the machine's, or those of its container."""
    of_machine = _bytes_of_pages("SC_PHYS_PAGES") or system_number("hw.memsize")
    return min(of_machine, memory_limit(root) or of_machine)


def _free_on_machine(root: Path, mapped: int) -> int:
    """Return what the machine has left.

    The system's own estimate counts cached files as free. Those that this process has mapped are not: among them are
    the weights that every pass reads.
    """
    available = _kib_of(root / "proc/meminfo").get("MemAvailable")
    if available is None:  # not Linux
        of_mac = sum(map(system_number, _PAGES_LEFT)) * mmap.PAGESIZE
        return of_mac or _bytes_of_pages("SC_AVPHYS_PAGES") or whole_memory(root) // 2
    return available - mapped


def _bytes_of_pages(name: str) -> int:
    """Return the memory that the system counts in pages under a name; 0 if it has no such name."""
    with contextlib.suppress(ValueError, OSError):
        return max(0, os.sysconf(name)) * mmap.PAGESIZE
    return 0


def _kib_of(file: Path) -> dict[str, int]:
    """Return the sizes that a file of the system names, in bytes."""
    with contextlib.suppress(OSError):
        return {name: int(size) << 10 for name, size in _KIB.findall(file.read_text("ascii", errors="replace"))}
    return {}
