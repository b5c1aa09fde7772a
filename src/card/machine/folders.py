"""Folders of this machine for what a later start can use again, and which other users must not write to it.

A write to a kept file changes what this process does: machine code is run, weights decide on texts. So nothing
is kept in, or read from, a folder that others can write to, or that they can put another one in the place of.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import logging
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from card.errors import SettingsError, plain_words

logger = logging.getLogger(__name__)

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600  # for the owner alone
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4095  # as nearly all file systems take
_MOST_LINKS = 40  # as the system follows
_MOST_BYTES = 64 << 20  # of a file that is read as a whole; none that was written here comes near


def weights_folder(cache_dir: str | None) -> Path | None:
    """Return the cache folder for converted weights; an empty ``cache_dir`` keeps nothing."""
    return None if cache_dir == "" else cache_folder(cache_dir)


def cache_folder(given: str | None) -> Path:
    """Return the folder for what may be kept between starts: as given, or by the system's custom.

    A user without a home has one in the folder for temporary files.
    """
    if given is not None:
        return expanded(given)
    cache_home = os.environ.get("XDG_CACHE_HOME")
    if cache_home:
        return Path(cache_home) / "card"
    home = expanded("~")
    if home == Path("~"):
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"card-{os.geteuid()}"
    return home / ".cache" / "card"


def expanded(path: str | Path) -> Path:
    """Return a path with ~ replaced by the home; as it is where there is none, as shells do.

    Raises: SettingsError for a name that is too long for any file system.
    """
    place = Path(os.path.expanduser(path))
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in place.parts]
    if max(sizes, default=0) > _MOST_NAME_BYTES or sum(sizes) + len(sizes) > _MOST_PATH_BYTES:
        raise SettingsError(f"{plain_words(str(place), 60)} is too long for a name of a file; give a shorter one")
    return place


def followed(path: Path) -> Path:
    """Return where a path leads, links followed, whether or not it is there. Raises: OSError for links in a circle."""
    place = Path(os.path.realpath(path))  # which Path.resolve is not in all releases: there a circle is a RuntimeError
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return place


def is_safe_folder(folder: Path, what: str) -> bool:
    """Return whether the content of a folder can be trusted; the reason why not is logged once.

    Args:
        folder: need not be there yet.
        what: the content, in words for the log.
    """
    why = why_unsafe(folder)
    if why is not None:
        _warn_once(f"{folder} is not used for {what}: {why}")
    return why is None


def why_unsafe(path: Path) -> str | None:
    """Return which other user controls a path, and what to do about it; None if only its owner does.

    All folders and links on the way are checked. A path that does not exist yet is safe if the folder that would hold
    it is. A world-writable folder on the way is safe if it is sticky, as /tmp is; the last one is not, since others can
    add to it.
    """
    try:
        way, is_there = list(_way_to(path)), path.exists()
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"
    for i, (place, facts) in enumerate(way):
        if facts.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to another user (uid {facts.st_uid}); give a folder of your own"
        is_last = is_there and i == len(way) - 1
        keeps_owners = bool(facts.st_mode & stat.S_ISVTX) and not is_last
        if not stat.S_ISLNK(facts.st_mode) and _others_write(facts) and not keeps_owners:
            mode = stat.S_IMODE(facts.st_mode)
            return f"others can write to {place} (mode {mode:o}); run chmod go-w, or give a folder of your own"
    return None


def make_private(folder: Path) -> None:
    """Make a folder, and those that it lies in, for their owner alone. Raises: OSError."""
    for one in [*reversed(folder.parents), folder]:
        if not one.is_dir():
            one.mkdir(PRIVATE_FOLDER, exist_ok=True)


@contextlib.contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a kept file to read. Raises: OSError; PermissionError if other users could have written to it."""
    # We never make links here. Opening a pipe would wait for a process that writes to it.
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(number)
        if not stat.S_ISREG(facts.st_mode):
            raise PermissionError(0, "it is no file")
        if facts.st_uid not in (os.geteuid(), 0) or _others_write(facts):
            raise PermissionError(0, "others could have written to it")
    except BaseException:
        os.close(number)
        raise
    with os.fdopen(number, "rb") as stream:
        yield stream


def read_kept(file: Path) -> bytes:
    """Return the content of a kept file. Raises: OSError, also if other users could have written to it."""
    with opened(file) as stream:
        num_bytes = os.fstat(stream.fileno()).st_size  # not the most that it may have: memory would be taken for that
        if num_bytes > _MOST_BYTES:
            raise OSError(0, f"it has more than {_MOST_BYTES} bytes")
        return stream.read(num_bytes)


def write_kept(file: Path, content: bytes) -> None:
    """Replace a kept file atomically, so that no process reads half of it. Raises: OSError; nothing is left then."""
    make_private(file.parent)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)  # for its owner alone
    with replaced(file, Path(name)), os.fdopen(handle, "wb") as stream:
        stream.write(content)


@contextlib.contextmanager
def replaced(file: Path, part: Path | None = None) -> Iterator[Path]:
    """Give the place to write a file to that takes its name at the end: it is whole or as before. Raises: OSError.

    Args:
        part: the place; None: beside the file, so that a process that was killed leaves one at most.
    """
    part = part or file.with_name(f"{file.name}.part")
    try:
        yield part
        part.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _way_to(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all that the system walks through to a path, as far as it is there: folders, and links. Raises: OSError."""
    whole = path.absolute()
    at, waiting, num_links = Path(whole.anchor), list(reversed(whole.parts[1:])), 0
    yield at, os.lstat(at)
    while waiting:
        part = waiting.pop()
        if part == "..":
            at = at.parent
            continue
        try:
            facts = os.lstat(at / part)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield at / part, facts
        if not stat.S_ISLNK(facts.st_mode):
            at = at / part
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise OSError(0, "too many links")
        target = Path(os.readlink(at / part))
        if target.is_absolute():
            at = Path(target.anchor)
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _others_write(facts: os.stat_result) -> bool:
    """Return whether users other than the owner and the system may write; the owner's own group does not count."""
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_own_group(facts.st_gid)


@functools.cache
def _is_own_group(group_id: int) -> bool:
    """Return whether a group is a user's private group, as many systems make for each user."""
    with contextlib.suppress(KeyError):
        group, user = grp.getgrgid(group_id), pwd.getpwuid(os.geteuid())
        return user.pw_gid == group_id and group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
    return False


@functools.cache
def _warn_once(words: str) -> None:
    logger.warning("%s", words)
