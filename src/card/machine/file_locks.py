"""Locks of files, by which processes take turns. A lock ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone_at(lock: Path) -> Iterator[None]:
    """Wait until no other process is here; the file is there only meanwhile. Raises: OSError."""
    is_mine = False
    while not is_mine:
        with lock.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # the process that held the lock before has removed it
                is_mine = os.path.samestat(os.fstat(stream.fileno()), lock.stat())
            if is_mine:
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)


def is_held(lock: Path) -> bool:
    """Return whether another process is there at this moment. Raises: OSError, but not if there is no lock."""
    try:
        with lock.open("r+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
