"""KV rows of beginnings of texts in files: one file each, bounded in bytes, shared by processes.

A file has a head (see `_Head`), the tokens, a checksum of both, and then the rows in parts, each with a checksum that
starts from the one before it in the file's order. So a file that was cut off, changed or put together is noticed.

Files of one identity (model and code) lie in a folder of their own. They are written under another name and renamed, so
that no process reads half of one. Those not used for longest go first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from card.machine.folders import make_private, opened, why_unsafe
from card.models.rows.parts import PartForm, RowsPart
from card.models.rows.pool_entries import common_length
from card.models.rows.row_tree import IntArray

logger = logging.getLogger(__name__)

BLOCK_ROWS = 32  # rows of a part, but for the last one
SPARE_BYTES = 1 << 30  # left free on the disk
_MAGIC = b"cardrows"
_HEAD = struct.Struct("<8s32sII")
_CHECK = struct.Struct("<I")
_MOST_TOKENS = 1 << 26  # of a head that can be believed
_SUFFIX, _PART = ".rows", ".part"
_STALE_S = 3600.0  # a part that nobody has written to for so long belongs to a process that was killed
_SETTLED_NS = 1_000_000_000  # a folder's time is only trusted when it is older: times of files are coarse


class _Damaged(Exception):
    """The fault of a file, in words."""


class _Head(NamedTuple):
    magic: bytes
    identity: bytes
    num_tokens: int
    is_long: int  # the rows are those of a text beyond `switch_len`


@dataclass(frozen=True, slots=True, eq=False)
class KeptBeginning:
    """A beginning of texts whose rows are in a file."""

    path: Path
    text: IntArray
    is_long: bool
    check: int  # of all before the rows


class PrefixFiles:
    """The files of one model below a folder that other models, and other processes, may share."""

    def __init__(self, root: Path, identity: bytes, form: PartForm, *, most_bytes: int) -> None:
        """Use a folder.

        Args:
            identity: 32 bytes that only this model and this code have.
            form: that of the model's rows.
            most_bytes: of the files of all models below ``root``.
        Raises: OSError if the folder cannot be made or read, PermissionError if other users can write to it.
        """
        self._root, self._identity, self._form, self._most_bytes = root, identity, form, most_bytes
        self._folder = root / identity.hex()[:32]
        if (why := why_unsafe(self._folder)) is not None:
            raise PermissionError(errno.EACCES, why)
        make_private(self._folder)
        self._index: dict[str, KeptBeginning] = {}
        self._aside: dict[str, tuple[int, int]] = {}  # files that are not used, as they were when this was found
        self._seen_ns = 0  # time of the folder's last change that was looked at
        self._refresh()

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size of the file of a beginning."""
        of_parts = sum(self._form.part_bytes(part) + _CHECK.size for part in parts_of(num_tokens))
        return _rows_start(num_tokens) + of_parts

    def find(self, text: IntArray, *, is_long: bool, more_than: int = 0) -> tuple[KeptBeginning, int] | None:
        """Return the file that has most for the beginning of a text, and for how many tokens.

        Args:
            more_than: fewer tokens than one more are of no use; None is returned then.
        """
        self._refresh()
        best, most = None, more_than
        for one in list(self._index.values()):
            if one.is_long == is_long and min(len(one.text), len(text)) > most and one.text[most] == text[most]:
                count = self._form.usable_rows(common_length(one.text, text), len(one.text))
                if count > most:
                    best, most = one, count
        return None if best is None else (best, most)

    def read(self, one: KeptBeginning, num_rows: int, take: Callable[[RowsPart, bytes, int], None]) -> bool:
        """Read the first rows of a file.

        Args:
            take: gets which rows a part has, their bytes, and how many of the first ones are wanted.
        Returns: whether all were read. If not, the file is not used any more, and what was taken is to be dropped.
        """
        try:
            with opened(one.path) as stream:
                stream.seek(_rows_start(len(one.text)))
                check = one.check
                for part in parts_of(len(one.text)):
                    if part.first < num_rows:
                        taken, check = self._part(stream, part, check)
                        take(part, taken, min(part.end, num_rows) - part.first)
        except FileNotFoundError:  # another process has made room
            self._forget(one)
            return False
        except (OSError, _Damaged) as error:
            self._leave_aside(one.path, error)
            return False
        with contextlib.suppress(OSError):
            os.utime(one.path)
        return True

    @contextlib.contextmanager
    def written(self, text: IntArray, *, is_long: bool) -> Iterator[Callable[[memoryview], None] | None]:
        """Give what takes the parts of a new file, see `parts_of`, one after the other; None if it has no room.

        The file is there at the end of the block, and the shorter ones that it makes useless are gone. If the block
        raises, nothing is left.

        Raises: OSError if the disk is full or cannot be written to.
        """
        num_bytes = self.num_bytes(len(text))
        if num_bytes > self._most_bytes:
            yield None
            return
        make_private(self._folder)
        self._make_room(num_bytes)
        head = _HEAD.pack(*_Head(_MAGIC, self._identity, len(text), int(is_long)))
        head += text.astype("<i4").tobytes()
        check = zlib.crc32(head)
        path = self._folder / (hashlib.blake2b(head, digest_size=16).hexdigest() + _SUFFIX)
        number, part = tempfile.mkstemp(dir=self._folder, prefix=path.stem, suffix=_PART)  # for its owner alone
        try:
            with os.fdopen(number, "wb") as stream:
                stream.write(head + _CHECK.pack(check))
                running = check

                def add(part: memoryview) -> None:
                    nonlocal running
                    running = zlib.crc32(part, running)
                    stream.write(part)
                    stream.write(_CHECK.pack(running))

                yield add
            Path(part).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        new = KeptBeginning(path, text, is_long, check)
        self._aside.pop(path.name, None)
        self._index[path.name] = new
        for old in list(self._index.values()):
            num_common = self._form.usable_rows(common_length(old.text, text), len(text))
            if old is not new and old.is_long == is_long and num_common == len(old.text):
                self._forget(old)
                with contextlib.suppress(OSError):
                    old.path.unlink()

    def _part(self, stream: BinaryIO, part: RowsPart, check: int) -> tuple[bytes, int]:
        """Return the next part of a file, and its checksum. Raises: _Damaged, OSError."""
        size = self._form.part_bytes(part)
        taken, stored = stream.read(size), stream.read(_CHECK.size)
        if len(taken) < size or len(stored) < _CHECK.size:
            raise _Damaged("it is cut off")
        checksum = zlib.crc32(taken, check)
        if _CHECK.unpack(stored)[0] != checksum:
            raise _Damaged(f"it is damaged at row {part.first} or soon after")
        return taken, checksum

    def _refresh(self) -> None:
        """Look at the files again if some came or went: other processes write to the folder, too."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns == self._seen_ns and time.time_ns() - changed_ns > _SETTLED_NS:
                return
            there = {one.name: one for one in os.scandir(self._folder) if one.name.endswith(_SUFFIX)}
        except OSError:  # somebody has removed the folder
            there, changed_ns = {}, 0
        self._seen_ns = changed_ns
        for name in set(self._index) - there.keys():
            self._index.pop(name, None)
        for name in there.keys() - set(self._index):
            path = self._folder / name
            if self._aside.get(name) == _state_of(path):
                continue
            try:
                self._index[name] = self._read_head(path)
            except FileNotFoundError:
                continue
            except (OSError, _Damaged) as error:
                self._leave_aside(path, error)

    def _read_head(self, path: Path) -> KeptBeginning:
        """Return what a file says that it holds. Raises: OSError, _Damaged."""
        with opened(path) as stream:
            raw = stream.read(_HEAD.size)
            if len(raw) < _HEAD.size:
                raise _Damaged("it is cut off")
            head = _Head(*_HEAD.unpack(raw))
            if head.magic != _MAGIC or not 0 < head.num_tokens <= _MOST_TOKENS:
                raise _Damaged("it holds no rows")
            size = os.fstat(stream.fileno()).st_size
            if size < _rows_start(head.num_tokens):
                raise _Damaged("it is cut off")
            tokens, stored = stream.read(4 * head.num_tokens), stream.read(_CHECK.size)
        check = zlib.crc32(raw + tokens)
        if len(stored) < _CHECK.size or _CHECK.unpack(stored)[0] != check:
            raise _Damaged("it is damaged at its beginning")
        if head.identity != self._identity:
            raise _Damaged("it is of another model, or of other code")
        if size != self.num_bytes(head.num_tokens):
            raise _Damaged(f"it has {size} bytes, and {self.num_bytes(head.num_tokens)} are expected")
        return KeptBeginning(path, np.frombuffer(tokens, "<i4").astype(np.int64), bool(head.is_long), check)

    def _leave_aside(self, path: Path, error: Exception) -> None:
        """Use a file no more, until there is another one of its name."""
        logger.warning("the rows in %s are left aside: %s", path, getattr(error, "strerror", None) or error)
        self._index.pop(path.name, None)
        self._aside[path.name] = _state_of(path)

    def _forget(self, one: KeptBeginning) -> None:
        if self._index.get(one.path.name) is one:
            self._index.pop(one.path.name, None)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the files not used for longest. Raises: OSError if the disk is full all the same."""
        sizes, used_ns = dict[Path, int](), dict[Path, int]()
        for path in self._root.glob("*/*"):
            with contextlib.suppress(OSError):  # another process may remove it
                facts = path.lstat()
                if path.suffix == _PART and time.time() - facts.st_mtime > _STALE_S:
                    path.unlink()
                elif path.suffix in (_SUFFIX, _PART):
                    sizes[path], used_ns[path] = facts.st_size, facts.st_mtime_ns
        total, free = sum(sizes.values()), shutil.disk_usage(self._root).free - SPARE_BYTES
        for path in sorted((path for path in sizes if path.suffix == _SUFFIX), key=used_ns.__getitem__):
            if total + num_bytes <= self._most_bytes and num_bytes <= free:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total, free = total - sizes[path], free + sizes[path]
        if num_bytes > free:
            raise OSError(errno.ENOSPC, f"the disk has no room for {num_bytes} bytes and {SPARE_BYTES} besides")


def parts_of(num_tokens: int) -> Iterator[RowsPart]:
    """Yield the parts that the rows of a text have in its file."""
    for first in range(0, num_tokens, BLOCK_ROWS):
        yield RowsPart(first, min(first + BLOCK_ROWS, num_tokens), first + BLOCK_ROWS >= num_tokens)


def _rows_start(num_tokens: int) -> int:
    return _HEAD.size + 4 * num_tokens + _CHECK.size


def _state_of(path: Path) -> tuple[int, int]:
    """Return what tells a file from another one of its name."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        return facts.st_ino, facts.st_ctime_ns
    return 0, 0
