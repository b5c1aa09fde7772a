"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from pathlib import Path

import pytest

from card.machine.memory import give_back_memory, give_back_pages, take_large_pages, unwritten_parts

COMPILER = "libllvmlite.so"
MAPS = """\
1000-3000 r--p 00000000 fe:00 7   /lib/libone.so
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd
3000-4000 r-xp 00002000 fe:00 7   /lib/libone.so
Rss:                   4 kB
Anonymous:             4 kB
VmFlags: rd ex
4000-6000 rw-p 00003000 fe:00 7   /lib/libone.so
Rss:                   0 kB
Anonymous:             0 kB
VmFlags: rd wr
6000-7000 rw-p 00000000 00:00 0
Anonymous:             0 kB
8000-9000 r-xp 00000000 fe:00 8   /lib/libother.so
Anonymous:             0 kB
a000-d000 r-xp 00000000 fe:00 7   /lib/libone.so
Rss:                   8 kB
Anonymous:             0 kB
"""


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


def test_parts_of_a_library_that_were_written_to_stay(tmp_path: Path) -> None:
    """Its addresses of functions are among them: the system's loader has written them, and the file has others."""
    maps = tmp_path / "smaps"
    assert unwritten_parts("libone.so", maps) == []
    maps.write_text(MAPS, "ascii")
    assert unwritten_parts("libone.so", maps) == [(0x1000, 0x2000), (0xA000, 0x3000)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is written")
def test_the_compiler_works_when_its_pages_are_given_back() -> None:
    binding = pytest.importorskip("llvmlite.binding")
    assert give_back_pages(COMPILER) == sum(size for _, size in unwritten_parts(COMPILER)) > 2**20
    module = binding.parse_assembly("define i64 @seven() { ret i64 7 }")
    module.verify()
    assert "seven" in str(module)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no pages of 2 MB")
def test_large_pages_are_asked_for_between_the_borders_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    class Library:
        def madvise(self, first: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
            asked.append((first.value or 0, size.value, advice))
            return 0

    monkeypatch.setattr("card.machine.memory.ctypes.CDLL", lambda name: Library())
    page = mmap.PAGESIZE
    assert take_large_pages(3 * page + 8, 5 * page)
    assert asked == [(4 * page, 4 * page, mmap.MADV_HUGEPAGE)]
    assert not take_large_pages(3 * page + 8, page)
    assert len(asked) == 1
