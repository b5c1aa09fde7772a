"""A folder of converted models, kept between starts: bounded, shared by processes, and without partial entries.

A damaged entry is made again. Nothing is kept in a folder that other users can write to.

Each entry is a folder. The process that converts a model holds a lock beside the entry, writes under another name and
renames at the end. Processes that read an entry map its files, so the data stays readable after the entry is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from card.machine.file_locks import alone_at, is_held
from card.machine.folders import PRIVATE_FOLDER, is_safe_folder, make_private, why_unsafe
from card.machine.memory import is_shortage
from card.models.files.checksums import is_whole, write_checksums
from card.models.warn_once import warn_once

KEPT_FOLDER = "gguf"  # below the cache folder
MOST_BYTES = 20 << 30  # of all entries but a single one that is larger; those not used for longest go first
_SPARE_BYTES = 1 << 30  # left free on the disk
_SOURCE_NAME = "source"  # in an entry: the path of what it was made from
_UNFINISHED = ".unfinished"  # ends the name of an entry that is being written, or was when its process was killed


@dataclass(frozen=True, slots=True)
class KeptEntry:
    """A folder that is kept, and what users are told of it."""

    folder: Path
    source: str  # path of what it was made from; empty if nothing says it
    num_bytes: int
    used_at: float  # seconds since 1970


class KeptWeights:
    """The entries below one folder."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES, *, source: Path | None = None) -> None:
        """Use ``folder``, which need not be there yet; ``source`` is what new entries are made from."""
        self._folder = folder
        self._source = source
        self._most_bytes = most_bytes

    def find(self, name: str) -> Path | None:
        """Return the folder of a finished entry, None if there is none that is whole and of our own making."""
        folder = self._folder / name
        try:
            if not folder.is_dir() or not self._is_safe() or why_unsafe(folder) is not None or not is_whole(folder):
                return None
        except OSError as error:
            if is_shortage(error):
                raise  # a read error is no sign of damage, and converting again would delete the entry first
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)
        return folder

    def make(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> Path | None:
        """Return an entry, written by ``write`` into an empty folder if no other process has made it meanwhile.

        Args:
            num_bytes: what it will take.
        Returns: None if it cannot be kept, which is logged.
        Raises: the errors of ``write``, except OSError.
        """
        if (stored := self.find(name)) is not None:
            return stored
        if not self._is_safe():
            return None
        try:
            make_private(self._folder)
            with alone_at(self._folder / f"{name}.lock"):
                return self.find(name) or self._written(self._folder / name, num_bytes, write)
        except OSError as error:
            if is_shortage(error):
                raise
            warn_once(
                f"converted weights are not kept in {self._folder}, so the next start converts again: "
                f"{error.strerror or error}"
            )
            return None

    def entries(self) -> list[KeptEntry]:
        """Return all entries, those that a killed process left unfinished too; not those that are being made."""
        with contextlib.suppress(FileNotFoundError):
            folders = sorted(one for one in self._folder.iterdir() if one.is_dir() and not self._is_being_made(one))
            return [KeptEntry(one, _source_of(one), _num_bytes(one), _used_at(one) / 1e9) for one in folders]
        return []

    def _is_being_made(self, folder: Path) -> bool:
        """Return whether a process holds the lock of an unfinished entry."""
        if not folder.name.endswith(_UNFINISHED):
            return False
        return is_held(folder.with_name(folder.name.removesuffix(_UNFINISHED) + ".lock"))

    def _is_safe(self) -> bool:
        return is_safe_folder(self._folder, "converted weights")

    def _written(self, folder: Path, num_bytes: int, write: Callable[[Path], None]) -> Path:
        """Make an entry under another name, then rename it. Raises: OSError, also where there is no room."""
        unfinished = folder.with_name(folder.name + _UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        self._make_room(num_bytes)
        try:
            unfinished.mkdir(PRIVATE_FOLDER)
            write(unfinished)
            if self._source is not None:
                (unfinished / _SOURCE_NAME).write_bytes(os.fsencode(self._source.absolute()))
            write_checksums(unfinished)
            shutil.rmtree(folder, ignore_errors=True)  # what was damaged, or what others could write to
            return unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the entries not used for longest. Raises: OSError if that does not make room enough.

        One entry may be larger than all may be together: the new one, or the one of that size that was used last.
        """
        most, sizes = self._most_bytes, {one: _num_bytes(one) for one in self._folder.iterdir() if one.is_dir()}
        free = shutil.disk_usage(self._folder).free - _SPARE_BYTES
        total = sum(sizes.values())
        if num_bytes > total + free:  # nothing is removed in vain
            raise OSError(f"the disk has no room for them and {_SPARE_BYTES / 1e9:.1f} GB besides")
        large = sorted((one for one in sizes if sizes[one] > most), key=_used_at)
        spared = [] if num_bytes > most else large[-1:]
        room = most + sum(sizes[one] for one in spared) + (num_bytes if num_bytes > most else 0)
        for one in sorted(sizes, key=lambda one: (one in spared, one not in large, _used_at(one))):
            if total + num_bytes <= room and num_bytes <= free:
                break
            shutil.rmtree(one)
            total, free = total - sizes[one], free + sizes[one]
        if num_bytes > most:
            warn_once(
                f"the converted weights take {num_bytes / 1e9:.1f} GB below {self._folder}, where those of all models "
                f"are to take {most / 1e9:.1f} GB: they are kept as a single model that is larger"
            )


def state_of(files: Iterable[Path]) -> str:
    """Return what tells files from others, and from what they were before. Raises: OSError."""
    stats = {file: file.stat() for file in files}
    return "\n".join(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}" for file, stat in stats.items())


def _source_of(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return os.fsdecode((folder / _SOURCE_NAME).read_bytes())
    return ""


def _num_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):  # it may be removed meanwhile
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def _used_at(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime_ns
    return 0
