"""A folder of converted models, kept between starts: bounded, shared by processes, and never with half of one in it.

Each entry is a folder with a lock beside it. Who converts holds the lock alone, writes under another name and renames;
who reads shares it, so that what is in use is not removed. What a killed process left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

MOST_BYTES = 20 << 30  # of all entries; those that were not used for longest go first
_SPARE_BYTES = 1 << 30  # left free on the disk
_MOST_DIGESTS = 500
_BLOCK_BYTES = 1 << 22
_UNFINISHED, _LOCK = ".unfinished", ".lock"


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells a file from another one, and from what it was before."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the state of a file now. Raises: OSError."""
        stat = path.stat()
        return cls(str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Kept:
    """A finished entry that is in use: while this object lives, nobody removes it."""

    def __init__(self, folder: Path, lock: int | None) -> None:
        """Take over an open lock; None where there can be none."""
        self.folder = folder
        self._lock = lock

    def close(self) -> None:
        """Let it go. May be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def __deepcopy__(self, _: object) -> Kept:
        """Return itself: a lock has one owner."""
        return self


class KeptWeights:
    """The entries below one folder."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        """Use ``folder``, which need not be there yet."""
        self._folder = folder
        self._most_bytes = most_bytes

    def digest(self, state: FileState) -> str:
        """Return the SHA-256 of a file; it is read once for each of its states. Raises: OSError."""
        file = self._folder / "digests.json"
        try:
            known = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError):
            known = {}
        key = f"{state.path}|{state.num_bytes}|{state.mtime_ns}|{state.inode}"
        if key not in known:
            digest = hashlib.sha256()
            with open(state.path, "rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
            if FileState.of(Path(state.path)) != state:
                return digest.hexdigest()  # of nothing that will be there again
            known = dict([*known.items(), (key, digest.hexdigest())][-_MOST_DIGESTS:])
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                _replace(file, msgspec.json.encode(known))
        return known[key]

    def find(self, name: str) -> Kept | None:
        """Return a finished entry, None if there is none."""
        folder = self._folder / name
        if not folder.is_dir():
            return None
        try:
            lock: int | None = self._locked(name, fcntl.LOCK_SH)
        except OSError:
            lock = None  # a folder that may only be read, where nobody removes anything
        if not folder.is_dir():
            if lock is not None:
                os.close(lock)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)
        return Kept(folder, lock)

    def make(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> Kept | None:
        """Return an entry, written by ``write`` into an empty folder if no other process has made it meanwhile.

        Args:
            num_bytes: what it will take.
        Returns: None if it cannot be kept, which is logged.
        Raises: whatever ``write`` raises besides OSError.
        """
        folder = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = self._locked(name, fcntl.LOCK_EX)
            try:
                if not folder.is_dir():
                    self._write(folder, num_bytes, write)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if not folder.is_dir():
                    raise OSError("another process has removed it")
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            _warn_once(
                f"converted weights are not kept in {self._folder}, so the next start converts again: "
                f"{error.strerror or error}"
            )
            return None
        return Kept(folder, lock)

    def _write(self, folder: Path, num_bytes: int, write: Callable[[Path], None]) -> None:
        """Make an entry under another name, then rename it. Raises: OSError, also where there is no room."""
        unfinished = folder.with_name(folder.name + _UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        if problem := self._make_room(num_bytes):
            raise OSError(problem)
        try:
            unfinished.mkdir()
            write(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _locked(self, name: str, how: int) -> int:
        """Return the open lock of an entry. Raises: OSError, BlockingIOError if ``how`` does not wait."""
        path = self._folder / (name + _LOCK)
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, how)
                if os.fstat(lock).st_ino == path.stat().st_ino:
                    return lock
            except FileNotFoundError:
                pass  # who removed the entry has removed its lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _make_room(self, num_bytes: int) -> str:
        """Remove what was left behind, and the entries not used for longest; return why there is no room."""
        if num_bytes > self._most_bytes:
            return f"they take {num_bytes / 1e9:.1f} GB, at most {self._most_bytes / 1e9:.1f} GB are kept"
        for left in self._folder.glob("*" + _UNFINISHED):
            self._remove(left.name.removesuffix(_UNFINISHED), left)
        entries = [one for one in self._folder.iterdir() if one.is_dir() and one.suffix != _UNFINISHED]
        sizes = {one: _num_bytes(one) for one in entries}
        free = shutil.disk_usage(self._folder).free - _SPARE_BYTES
        total = sum(sizes.values())
        if num_bytes > total + free:  # nothing is removed in vain
            return f"they take {num_bytes / 1e9:.1f} GB, which the disk does not have"
        for one in sorted(entries, key=_used_at):
            if total + num_bytes <= self._most_bytes and num_bytes <= free:
                break
            if self._remove(one.name, one):
                total, free = total - sizes[one], free + sizes[one]
        if total + num_bytes > self._most_bytes:
            return f"all {self._most_bytes / 1e9:.1f} GB that are kept at most are in use"
        return "" if num_bytes <= free else f"they take {num_bytes / 1e9:.1f} GB, which the disk does not have"

    def _remove(self, name: str, folder: Path) -> bool:
        """Remove an entry, or what is left of one; return False if it is in use."""
        try:
            lock = self._locked(name, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            gone = folder.with_name(name + _UNFINISHED)
            if folder != gone:
                folder.rename(gone)
            shutil.rmtree(gone)
            (self._folder / (name + _LOCK)).unlink()
        except OSError:
            return False
        finally:
            os.close(lock)
        return True


@functools.lru_cache(maxsize=16)
def _warn_once(message: str) -> None:
    """Say what is the same for all models of a start."""
    logger.warning(message)


def _num_bytes(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):  # it may be removed meanwhile
        for file in folder.iterdir():
            total += file.stat().st_size
    return total


def _used_at(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _replace(file: Path, content: bytes) -> None:
    """Replace a file as a whole, so that nobody reads half of it."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(name, file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
