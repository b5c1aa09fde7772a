"""Texts on disk: bounded, by owner, shared by processes, private to their user.

The file is an SQLite database with a write-ahead log, so it must not lie on a network file system. Only its user can
read it, as its texts are not encrypted.
"""

from __future__ import annotations

import logging
import sqlite3
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from card.errors import SettingsError, named

logger = logging.getLogger(__name__)

Tokens = NDArray[np.uint32]

_FILE_NAME = "texts.sqlite3"  # in a folder that the user names
_OWNERS_ONLY = 0o600
_APPLICATION_ID = 0x43415244  # "CARD", in the header of the file
_VERSION = 2  # version 1 identified tokenizers by their size only
_IS_OWN = "key = :key AND tokenizer = :tokenizer AND vocab_size = :vocab_size"


class Owner(NamedTuple):
    """Owner of texts: other owners cannot see them."""

    key: str
    tokenizer: str  # fingerprint; token ids mean other words in another tokenizer
    vocab_size: int


class TextDatabase:
    """The texts of one owner in an SQLite file. Other processes may use the file, and may end at any moment."""

    def __init__(self, path: Path, owner: Owner, max_tokens: int, *, busy_timeout_s: float) -> None:
        """Open or make the file.

        Args:
            path: the file, or a folder for it.
            owner: its texts are read, stored and counted; texts of other owners in the file stay as they are.
            max_tokens: most tokens kept for this owner; the oldest texts are deleted.
            busy_timeout_s: longest wait for another process's write.
        Raises: SettingsError for a file that is no such database or cannot be written.
        """
        self._path = path / _FILE_NAME if path.is_dir() else path
        self._owner = owner
        self._max_tokens = max_tokens
        give_up_s = time.monotonic() + busy_timeout_s
        while True:
            try:
                self._db = self._open(busy_timeout_s)
                return
            except (sqlite3.Error, OSError) as error:
                # Several processes may make one file: SQLite may then answer "busy" without the configured wait.
                is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > give_up_s:
                    raise SettingsError(
                        f"{named('suffix_store')} cannot be used: {self._path}: {error}; "
                        "name a file of this program, or a new one in a folder that can be written"
                    ) from error
                time.sleep(0.01)

    def _open(self, busy_timeout_s: float) -> sqlite3.Connection:
        if not self._path.exists():
            self._path.touch(mode=_OWNERS_ONLY)
        db = sqlite3.connect(
            self._path, timeout=busy_timeout_s, isolation_level="IMMEDIATE", check_same_thread=False
        )  # opened by the thread that makes the writer, then used by the writer's own
        try:
            db.execute("BEGIN IMMEDIATE")  # takes the write lock, so that only one process makes the table
            with db:
                self._make_table(db)
                self._evict(db)  # the bound may have been larger before
            self._keep_private()
            db.execute("PRAGMA journal_mode=WAL")  # only now that the file is known to be ours
            db.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last texts, not the file
        except BaseException:
            db.close()
            raise
        return db

    def _keep_private(self) -> None:
        """Make the file and SQLite's files beside it readable by its user only, whichever process made them."""
        for path in (self._path, *(self._path.with_name(f"{self._path.name}-{kind}") for kind in ("wal", "shm"))):
            mode = _OWNERS_ONLY
            try:
                mode = stat.S_IMODE(path.stat().st_mode)
                if not mode & ~_OWNERS_ONLY:
                    continue
                path.chmod(mode & _OWNERS_ONLY)
            except FileNotFoundError:  # not in use, so SQLite has no files beside it
                continue
            except PermissionError:
                logger.warning("%s can be read by others (mode %o) and belongs to another user", path, mode)
            else:
                logger.warning("%s could be read by others (mode %o); now only its owner can", path, mode)

    @staticmethod
    def _make_table(db: sqlite3.Connection) -> None:
        ((kind,),) = db.execute("PRAGMA application_id")
        ((version,),) = db.execute("PRAGMA user_version")
        ((num_tables,),) = db.execute("SELECT count(*) FROM sqlite_master")
        if num_tables and (kind, version) != (_APPLICATION_ID, _VERSION):
            raise sqlite3.DatabaseError("file is a database of another program or version")
        db.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version={_VERSION}")
        db.execute(
            "CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, "
            "tokenizer TEXT NOT NULL, vocab_size INTEGER NOT NULL, num_tokens INTEGER NOT NULL, "
            "token_ids BLOB NOT NULL)"  # little-endian uint32
        )
        db.execute("CREATE INDEX IF NOT EXISTS by_owner ON texts (key, tokenizer, vocab_size, id, num_tokens)")

    def add(self, texts: Sequence[Tokens]) -> None:
        """Store texts, all or none, and delete the oldest ones beyond the bound. Raises: sqlite3.Error."""
        ends = [text[-self._max_tokens :] for text in texts]
        with self._db:
            self._db.executemany(
                "INSERT INTO texts (key, tokenizer, vocab_size, num_tokens, token_ids) VALUES (?, ?, ?, ?, ?)",
                [(*self._owner, len(text), text.astype("<u4").tobytes()) for text in ends],
            )
            self._evict(self._db)

    def _evict(self, db: sqlite3.Connection) -> None:
        """Delete the oldest texts until the newer ones fit under the bound."""
        db.execute(
            f"DELETE FROM texts WHERE {_IS_OWN} AND id <= (SELECT max(id) FROM ("
            "SELECT id, sum(num_tokens) OVER (ORDER BY id DESC) AS num_from_here FROM texts "
            f"WHERE {_IS_OWN}) WHERE num_from_here > :max_tokens)",
            {**self._owner._asdict(), "max_tokens": self._max_tokens},
        )

    def texts(self) -> list[Tokens]:
        """Return the owner's texts, oldest first. Raises: sqlite3.Error, also for damaged texts."""
        rows = self._db.execute(
            f"SELECT num_tokens, token_ids FROM texts WHERE {_IS_OWN} ORDER BY id", self._owner._asdict()
        ).fetchall()
        texts = []
        for num_tokens, blob in rows:
            if not isinstance(blob, bytes) or len(blob) != 4 * num_tokens:
                raise sqlite3.DatabaseError("a text is damaged")
            texts.append(np.frombuffer(blob, "<u4").astype(np.uint32))
        if any(len(text) and int(text.max()) >= self._owner.vocab_size for text in texts):
            raise sqlite3.DatabaseError("a text has tokens beyond the vocabulary")
        return texts

    def close(self) -> None:
        """Close the file."""
        self._db.close()
