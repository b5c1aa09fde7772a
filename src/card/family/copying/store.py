"""Finished texts on disk, from which later requests get candidates: opt-in, by key, bounded, shared by processes.

A text is the output of a request, without its prompt. It belongs to a key and to the tokenizer of its token ids.
Requests that must not see each other's texts need different keys.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from card.config import EngineSettings
from card.drafting.local.lookup import chance_per_count
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.drafting.local.suffix import best_first
from card.errors import SettingsError, named
from card.family.copying.record import StoreSettings
from card.family.copying.text_database import Owner, TextDatabase, Tokens
from card.machine.folders import expanded
from card.tree.nodes import NO_NODES, Nodes

logger = logging.getLogger(__name__)

Match = tuple[int, Sequence[int]]
"""Length in tokens, 0 for none, and the places where the match ends: at most `_MAX_PLACES`, evenly spread over all."""

_MIN_MATCH = 2
_MAX_MATCH = 32  # tokens of the text that are compared
_MAX_PLACES = 32  # occurrences of a match that are followed
_NOVELTY = 7.0  # see `chance_per_count`: among many texts, more matches are chance
_MIN_MERGED_TOKENS = 4096  # indexing as many takes about a millisecond
_MERGED_SHARE = 16  # new texts are merged when they exceed the others' size divided by this


class ContextIndex:
    """The places of some texts, sorted by the tokens that end there, read backwards.

    It is a suffix array of the reversed texts, cut off at `_MAX_MATCH` tokens: the places that share most tokens with
    the end of another text are neighbours, and one binary search finds them. Texts are separated by zeros, and tokens
    are stored as id + 1, so that no match crosses from text to text. The index is immutable, so one thread may read it
    while another makes the next. 12 bytes per token.
    """

    def __init__(self, texts: Sequence[Tokens]) -> None:
        gap = np.zeros(1, np.uint32)
        parts = [part for text in reversed(texts) for part in (gap, text[::-1] + np.uint32(1))]
        tokens = np.concatenate([*parts, np.zeros(_MAX_MATCH, np.uint32)])  # newest first; padded
        order = _sorted_places(tokens)
        order = order[(tokens[order] != 0) & (tokens[order - 1] != 0)]  # places of tokens that are followed by another
        self._order = order.astype(np.int32).data
        self._tokens = tokens.data
        self._bytes = tokens.astype(">u4").tobytes()  # big-endian: bytes compare as tokens do
        self.num_tokens = int(np.count_nonzero(tokens))

    def find(self, end: Sequence[int]) -> Match:
        """Return the longest suffix of ``end``, of `_MAX_MATCH` tokens at most, that occurs before a token of a text.

        It takes about 60 comparisons of `_MAX_MATCH` tokens for a million places.
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
        """Return the continuations at the places of a match, for `best_first`."""
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
        places_of.pop(0, None)  # the end of a text
        min_count = min_chance / chance
        return [
            (token - 1, len(some) * chance, (length + 1, some))
            for token, some in places_of.items()
            if len(some) >= min_count
        ]


def _num_shared(one: bytes, other: bytes) -> int:
    """Return how many leading tokens of four bytes are equal; both arguments have the same length."""
    difference = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return (8 * len(one) - difference.bit_length()) // 32


def _sorted_places(tokens: Tokens) -> NDArray[np.int64]:
    """Return all places sorted by the `_MAX_MATCH` tokens from each on; zeros follow the last token.

    Each round sorts by twice as many tokens, with a pair of ranks for each place. Source: Manber & Myers 1993, Suffix
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
    """The end of one request's text, and its output."""

    def __init__(self, writer: StoreWriter, prompt_ids: Sequence[int]) -> None:
        self._writer = writer
        self._token_ids = list(prompt_ids[-_MAX_MATCH:])
        self._num_prompt_tokens = len(self._token_ids)

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the tree of continuations of the longest match in the stored texts, likeliest candidates first."""
        end = self._token_ids[-_MAX_MATCH:]
        matches = [(index.find(end), index) for index in self._writer.indexes]
        match, index = max(matches, key=lambda one: one[0][0])  # on a tie, the first index, of newer texts
        return best_first(match, index.followers, budget) if match[0] >= _MIN_MATCH else NO_NODES

    def observe(self, seen: Observation) -> None:
        """Append the committed tokens."""
        self._token_ids += seen.new_ids

    def close(self) -> None:
        """Queue the output for storage."""
        self._writer.keep(self._token_ids[self._num_prompt_tokens :])


class StoreWriter(LocalWriter):
    """Proposes continuations from outputs of earlier requests with the same key and tokenizer, of any process.

    A thread stores the texts and indexes them. A small index of new texts is rebuilt for each batch. When it outgrows
    its share, the large index is rebuilt from the file, with the texts of other processes. Decoding never waits for
    either.
    """

    outlives_engine = True

    def __init__(
        self, settings: EngineSettings, vocab_size: int, tokenizer: str = "", *, busy_timeout_s: float = 5.0
    ) -> None:
        """Open the store and index its texts: about a second for a million tokens.

        Args:
            busy_timeout_s: longest wait for another process's write; a text that must wait longer is not stored.
        Raises: SettingsError without ``suffix_store``, or if it is another kind of file or cannot be written.
        """
        chosen = settings.of(StoreSettings)
        if chosen.suffix_store is None:
            raise SettingsError(
                f"the writer 'store' needs a file that keeps finished texts; set {named('suffix_store')} to its path, "
                "or use the writer 'suffix', which keeps none"
            )
        self._max_tokens = chosen.suffix_store_tokens
        self._database = TextDatabase(
            expanded(chosen.suffix_store),
            Owner(chosen.suffix_store_key, tokenizer, vocab_size),
            self._max_tokens,
            busy_timeout_s=busy_timeout_s,
        )
        try:
            old = ContextIndex(self._database.texts())
        except sqlite3.Error as error:
            self._database.close()
            raise SettingsError(
                f"{named('suffix_store')} cannot be read: {chosen.suffix_store}: {error}; delete the file or name "
                "another one"
            ) from error
        self.indexes: tuple[ContextIndex, ContextIndex] = (ContextIndex([]), old)  # on a tie, newer texts win
        self._new_texts: list[Tokens] = []  # of the first index
        self._waiting: list[Tokens] = []
        self._is_closing = self._has_failed = False
        self._lock = threading.Lock()  # held for moments only
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="card-suffix-store")

    def open(self, prompt_ids: Sequence[int]) -> WriterSequence:
        """Begin a request."""
        return StoreSequence(self, prompt_ids)

    def keep(self, token_ids: Sequence[int]) -> None:
        """Queue a text to be stored, unless it is too short to match."""
        with self._lock:
            if len(token_ids) > _MIN_MATCH and not self._is_closing:
                self._waiting.append(np.array(token_ids, np.uint32))
                self._thread.submit(self._store)

    def close(self) -> None:
        """Store the queued texts and end the thread. May be called twice."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._thread.submit(self._database.close)
        self._thread.shutdown()

    def _store(self) -> None:
        """Store and index the queued texts as one batch."""
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
