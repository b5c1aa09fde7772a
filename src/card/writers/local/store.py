"""Finished texts on disk, from which later requests get candidates: opt-in, by key, bounded, shared by processes.

The file is an SQLite database with a write-ahead log, so it must not lie on a network file system. A text is what a
request put out, without its prompt. It belongs to the key and to the tokenizer that its token ids are of. Whoever may
read the file can read the texts: it is made for its owner only, and requests that must not learn of each other need
different keys.
"""

from __future__ import annotations

import logging
import sqlite3
import stat
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from card.config import EngineSettings
from card.errors import SettingsError
from card.tree.nodes import NO_NODES, Nodes
from card.writers.local.lookup import chance_per_count
from card.writers.local.protocol import LocalWriter, Observation, WriterSequence
from card.writers.local.suffix import best_first

logger = logging.getLogger(__name__)

Tokens = NDArray[np.uint32]
Match = tuple[int, Sequence[int]]
"""Length in tokens, 0 for none, and the places where it ends: `_MAX_PLACES` at most, evenly drawn from all."""

_FILE_NAME = "texts.sqlite3"  # in a folder that the user names
_OWNERS_ONLY = 0o600
_APPLICATION_ID = 0x43415244  # "CARD", in the header of the file
_VERSION = 2  # 1 knew tokenizers by their size only
_MIN_MATCH = 2
_MAX_MATCH = 32  # tokens of the text that are compared
_MAX_PLACES = 32  # occurrences of a match that are followed
_NOVELTY = 7.0  # see `chance_per_count`: among many texts, more matches are chance
_MIN_MERGED_TOKENS = 4096  # indexing so many takes about a millisecond
_MERGED_SHARE = 16  # new texts are merged when they are more than one part in so many of the others
_IS_OWN = "key = :key AND tokenizer = :tokenizer AND vocab_size = :vocab_size"


class Owner(NamedTuple):
    """Owner of texts: no other owner gets to see them."""

    key: str
    tokenizer: str  # fingerprint; the same ids are other words to another tokenizer
    vocab_size: int


class TextDatabase:
    """The texts of one owner in an SQLite file. Other processes may use the file, and end at any moment."""

    def __init__(self, path: Path, owner: Owner, max_tokens: int, *, busy_timeout_s: float) -> None:
        """Open or make the file.

        Args:
            path: the file, or a folder for it.
            owner: whose texts are read, stored and counted; those of others in the file stay as they are.
            max_tokens: most tokens kept of this owner; the oldest texts give way.
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
                # Several processes that make one file: SQLite may answer "busy" without the wait that it was told of.
                is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > give_up_s:
                    raise SettingsError(
                        f"suffix_store cannot be used: {self._path}: {error}; "
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
            db.execute("BEGIN IMMEDIATE")  # asks for the right to write, and lets only one process make the table
            with db:
                self._make_table(db)
                self._evict(db)  # the bound may have been larger last time
            self._keep_private()
            db.execute("PRAGMA journal_mode=WAL")  # only now that the file is known to be one's own
            db.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may cost the last texts, not the file
        except BaseException:
            db.close()
            raise
        return db

    def _keep_private(self) -> None:
        """Let nobody but the owner read the file and what SQLite keeps beside it, whoever made them."""
        for path in (self._path, *(self._path.with_name(f"{self._path.name}-{kind}") for kind in ("wal", "shm"))):
            mode = _OWNERS_ONLY
            try:
                mode = stat.S_IMODE(path.stat().st_mode)
                if not mode & ~_OWNERS_ONLY:
                    continue
                path.chmod(mode & _OWNERS_ONLY)
            except FileNotFoundError:  # nobody uses the file, so there is none beside it
                continue
            except PermissionError:
                logger.warning("%s can be read by others (mode %o) and belongs to another user", path, mode)
            else:
                logger.warning("%s could be read by others (mode %o); now its owner alone can", path, mode)

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
        kept = [text[-self._max_tokens :] for text in texts]
        with self._db:
            self._db.executemany(
                "INSERT INTO texts (key, tokenizer, vocab_size, num_tokens, token_ids) VALUES (?, ?, ?, ?, ?)",
                [(*self._owner, len(text), text.astype("<u4").tobytes()) for text in kept],
            )
            self._evict(self._db)

    def _evict(self, db: sqlite3.Connection) -> None:
        """Delete the newest text that no longer fits under the bound with all that came after it, and all before it."""
        db.execute(
            f"DELETE FROM texts WHERE {_IS_OWN} AND id <= (SELECT max(id) FROM ("
            "SELECT id, sum(num_tokens) OVER (ORDER BY id DESC) AS num_from_here FROM texts "
            f"WHERE {_IS_OWN}) WHERE num_from_here > :max_tokens)",
            {**self._owner._asdict(), "max_tokens": self._max_tokens},
        )

    def texts(self) -> list[Tokens]:
        """Return the owner's texts, oldest first. Raises: sqlite3.Error, also for texts that make no sense."""
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


class ContextIndex:
    """The places of some texts, sorted by the tokens that end there, read backwards.

    It is a suffix array of the texts read from their ends, cut off at `_MAX_MATCH` tokens: those places that share most
    tokens with the end of another text are neighbours, and one binary search finds them. A zero lies between two texts,
    and tokens are one higher than their ids; so no match crosses from text to text. It is never changed, and so may be
    read by one thread while another makes the next. 12 bytes per token.
    """

    def __init__(self, texts: Sequence[Tokens]) -> None:
        gap = np.zeros(1, np.uint32)
        parts = [part for text in reversed(texts) for part in (gap, text[::-1] + np.uint32(1))]
        tokens = np.concatenate([*parts, np.zeros(_MAX_MATCH, np.uint32)])  # newest first; whole windows at the end too
        order = _sorted_places(tokens)
        order = order[(tokens[order] != 0) & (tokens[order - 1] != 0)]  # places of tokens that others follow
        self._order = order.astype(np.int32).data
        self._tokens = tokens.data
        self._bytes = tokens.astype(">u4").tobytes()  # big-endian: bytes compare as tokens do
        self.num_tokens = int(np.count_nonzero(tokens))

    def find(self, end: Sequence[int]) -> Match:
        """Return the longest suffix of ``end``, of `_MAX_MATCH` tokens at most, that stands in a text and is followed.

        Takes some 60 comparisons of `_MAX_MATCH` tokens for a million places.
        """
        newest_first = [token + 1 for token in end[: -_MAX_MATCH - 1 : -1]]
        wanted = struct.pack(f">{len(newest_first)}I", *newest_first)
        data, size = self._bytes, len(wanted)
        idx = bisect_left(self._order, wanted, key=lambda place: data[4 * place : 4 * place + size])
        neighbours = self._order[max(0, idx - 1) : idx + 1].tolist()
        length = max((_num_shared(wanted, data[4 * place : 4 * place + size]) for place in neighbours), default=0)
        if length == 0:
            return 0, ()
        size = 4 * length
        wanted = wanted[:size]
        first = bisect_left(self._order, wanted, 0, idx, key=lambda place: data[4 * place : 4 * place + size])
        last = bisect_right(self._order, wanted, idx, key=lambda place: data[4 * place : 4 * place + size])
        return length, self._order[first : last : -(-(last - first) // _MAX_PLACES)].tolist()

    def followers(self, match: Match, min_chance: float) -> list[tuple[int, float, Match]]:
        """Return what follows at those places, for `best_first`."""
        length, places = match
        chance = chance_per_count(length, len(places), novelty=_NOVELTY)
        tokens = self._tokens
        if len(places) == 1:
            place = places[0] - 1
            token = tokens[place]
            return [(token - 1, chance, (length + 1, (place,)))] if token and chance >= min_chance else []
        places_of: dict[int, list[int]] = defaultdict(list)
        for place in places:
            places_of[tokens[place - 1]].append(place - 1)
        places_of.pop(0, None)  # there a text ends
        min_count = min_chance / chance
        return [
            (token - 1, len(some) * chance, (length + 1, some))
            for token, some in places_of.items()
            if len(some) >= min_count
        ]


def _num_shared(one: bytes, other: bytes) -> int:
    """Return how many leading tokens of four bytes are the same; both are equally long."""
    difference = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return (8 * len(one) - difference.bit_length()) // 32


def _sorted_places(tokens: Tokens) -> NDArray[np.int64]:
    """Return all places sorted by the `_MAX_MATCH` tokens from each on, where zeros follow the last.

    Sorting by twice as many tokens each time, a pair of ranks for each place. Source: Manber & Myers 1993, Suffix
    arrays: a new method for on-line string searches.
    """
    ranks = tokens.astype(np.int64)
    span = 1
    while True:
        later = np.zeros_like(ranks)
        later[:-span] = ranks[span:]
        pairs = (ranks << 32) | later  # both are below 2**31
        order = np.argsort(pairs)
        span *= 2
        pairs = pairs[order]
        is_new = pairs[1:] != pairs[:-1]
        if span >= _MAX_MATCH or is_new.all():
            return order
        ranks[order[0]] = 0
        ranks[order[1:]] = np.cumsum(is_new)


class StoreSequence(WriterSequence):
    """The end of one request's text, and what it put out."""

    def __init__(self, writer: StoreWriter, prompt_ids: Sequence[int]) -> None:
        self._writer = writer
        self._token_ids = list(prompt_ids[-_MAX_MATCH:])
        self._num_prompt_tokens = len(self._token_ids)

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the tree of what followed the longest match in the stored texts, likeliest candidates first."""
        end = self._token_ids[-_MAX_MATCH:]
        matches = [(index.find(end), index) for index in self._writer.indexes]
        match, index = max(matches, key=lambda found: found[0][0])  # the first index, of newer texts, wins a draw
        return best_first(match, index.followers, budget) if match[0] >= _MIN_MATCH else NO_NODES

    def observe(self, seen: Observation) -> None:
        """Append the committed tokens."""
        self._token_ids += seen.new_ids

    def close(self) -> None:
        """Hand the output over to be stored."""
        self._writer.keep(self._token_ids[self._num_prompt_tokens :])


class StoreWriter(LocalWriter):
    """Proposes what earlier requests of the same key and tokenizer put out, in this process and before it.

    A thread of its own stores the texts and indexes them: in a small index of new texts, which is made anew for each
    batch, and in a large one, which is made from the file when the small one has outgrown its share, and so holds by
    then what other processes have stored too. A round of decoding never waits for either.
    """

    def __init__(
        self, settings: EngineSettings, vocab_size: int, tokenizer: str = "", *, busy_timeout_s: float = 5.0
    ) -> None:
        """Open the store and index what it holds: about a second for a million tokens.

        Args:
            busy_timeout_s: longest wait for another process's write; a text that must wait longer is not stored.
        Raises: SettingsError without ``suffix_store``, or if it is no such file or cannot be written.
        """
        if settings.suffix_store is None:
            raise SettingsError(
                "the writer 'store' needs a file that keeps finished texts; set suffix_store to its path, "
                "or use the writer 'suffix', which keeps none"
            )
        self._max_tokens = settings.suffix_store_tokens
        self._database = TextDatabase(
            Path(settings.suffix_store),
            Owner(settings.suffix_store_key, tokenizer, vocab_size),
            self._max_tokens,
            busy_timeout_s=busy_timeout_s,
        )
        try:
            old = ContextIndex(self._database.texts())
        except sqlite3.Error as error:
            self._database.close()
            raise SettingsError(
                f"suffix_store cannot be read: {settings.suffix_store}: {error}; delete the file or name another one"
            ) from error
        self.indexes: tuple[ContextIndex, ContextIndex] = (ContextIndex([]), old)  # the newer texts win a draw
        self._new_texts: list[Tokens] = []  # those of the first index
        self._waiting: list[Tokens] = []
        self._is_closing = self._has_failed = False
        self._lock = threading.Lock()  # held for moments only
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="card-suffix-store")

    def open(self, prompt_ids: Sequence[int]) -> WriterSequence:
        """Begin a request."""
        return StoreSequence(self, prompt_ids)

    def keep(self, token_ids: Sequence[int]) -> None:
        """Have a text stored soon. One that no match could be followed in is not."""
        with self._lock:
            if len(token_ids) > _MIN_MATCH and not self._is_closing:
                self._waiting.append(np.array(token_ids, np.uint32))
                self._thread.submit(self._store)

    def close(self) -> None:
        """Store what waits and end the thread. May be called twice."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._thread.submit(self._database.close)
        self._thread.shutdown()

    def _store(self) -> None:
        """Store and index, as one batch, the texts that have come since the last time."""
        with self._lock:
            texts, self._waiting = self._waiting, []
        if self._has_failed or not texts:
            return
        try:
            self._database.add(texts)
            if not self._is_closing:
                self._index(texts)
        except sqlite3.Error as error:
            self._has_failed = True
            logger.warning("texts are no longer stored: suffix_store failed: %s", error)

    def _index(self, texts: Sequence[Tokens]) -> None:
        old = self.indexes[1]
        self._new_texts += texts
        limit = max(min(_MIN_MERGED_TOKENS, self._max_tokens // _MERGED_SHARE), old.num_tokens // _MERGED_SHARE)
        if sum(map(len, self._new_texts)) > limit:
            self._new_texts = []
            self.indexes = ContextIndex([]), ContextIndex(self._database.texts())
        else:
            self.indexes = ContextIndex(self._new_texts), old


WRITER = StoreWriter
