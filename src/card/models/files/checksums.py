"""Folders of kept files, each with a list of its contents, so that a cut off or changed file is noticed."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from card.machine.container import num_usable_cores
from card.machine.folders import PRIVATE_FILE, opened, read_kept, write_kept

_NAME = "seal.json"
_PART_BYTES = 8 << 20  # read at once


class _File(msgspec.Struct, frozen=True):
    num_bytes: int
    checksums: list[int]  # of its parts
    written_at: tuple[int, int]  # times of the last change of content and of anything, which no program can set


def write_checksums(folder: Path) -> None:
    """List what the files of a folder hold, and make them writable for this user only. Raises: OSError."""
    for one in folder.iterdir():
        one.chmod(PRIVATE_FILE)
    files = {one.name: _look(one) for one in sorted(folder.iterdir())}
    write_kept(folder / _NAME, msgspec.json.encode(files))


def is_whole(folder: Path) -> bool:
    """Return whether the files of a folder are as they were listed, and writable for this user only.

    Files that were not touched since then are not read: weights are gigabytes, and a start takes seconds.

    Raises: OSError.
    """
    try:
        listed = msgspec.json.decode(read_kept(folder / _NAME), type=dict[str, _File])
    except (ValueError, msgspec.MsgspecError, RecursionError):  # ValueError: words that are no UTF-8
        return False
    names = {one.name for one in folder.iterdir()} - {_NAME}
    return names == listed.keys() and all(_is_same(folder / name, file) for name, file in listed.items())


def _is_same(path: Path, file: _File) -> bool:
    with opened(path) as stream:
        facts = os.fstat(stream.fileno())
    if facts.st_size != file.num_bytes:
        return False
    return _times(facts) == file.written_at or _look(path).checksums == file.checksums


def _look(path: Path) -> _File:
    """Read a file, parts of it on each core."""
    with opened(path) as stream:
        number = stream.fileno()
        facts = os.fstat(number)

        def checksum(first: int) -> int:
            return zlib.crc32(os.pread(number, _PART_BYTES, first))

        with ThreadPoolExecutor(num_usable_cores()) as threads:
            checksums = list(threads.map(checksum, range(0, facts.st_size, _PART_BYTES)))
    return _File(facts.st_size, checksums, _times(facts))


def _times(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_mtime_ns, facts.st_ctime_ns
