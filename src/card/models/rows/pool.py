"""`SequencePool`: bounded KV memory for the sequences of one model, and reuse of rows that hold the same text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from card.errors import CapacityError, ModelError, SettingsError
from card.models.protocol import LanguageModel, LengthDependent, Sharing, Stateful, sequence_bytes
from card.models.rows.pool_entries import MIN_SHARED_TOKENS, Entries, Entry, Opened, PoolStats, common_length
from card.models.rows.prefix_cache import PrefixCache
from card.models.rows.row_tree import IntArray

BLOCK_ROWS = 32  # rows are counted in blocks of this many
MAX_RETAINED = 128  # keeps the search for a shared text well below a millisecond
WORTH_SHRINKING = 2  # a finished sequence moves to a smaller place if that is at most 1 / this of what it has
MAX_EXCESS = 2  # a retained sequence is taken over as it is only if it has at most this many times the rows needed


class SequencePool:
    """Opens and closes the sequences of one model within ``max_bytes``.

    A *running* sequence belongs to the caller, from `open` to `close`. A closed one can stay behind as a *retained*
    sequence. It belongs to no request and lends its rows to a text that begins alike. The least recently used one is
    dropped first when room is needed. Rows are lent as copies, which may share memory until they change: no sequence
    ever sees another's changes, and what several share counts once. Not thread-safe; call it between forward passes.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_bytes: int,
        *,
        max_retained: int = MAX_RETAINED,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """Make an empty pool; all sequences of ``model`` should come from it.

        Args:
            max_bytes: memory for the rows of running and retained sequences together.
            max_retained: most retained sequences.
            prefixes: keeps rows of long beginnings in files.
        Raises: SettingsError if not even the smallest sequence fits, or for a negative ``max_retained``.
        """
        least_bytes = sequence_bytes(model, min(BLOCK_ROWS, model.max_rows))
        if max_bytes < least_bytes:
            raise SettingsError(f"the KV memory must be {least_bytes} bytes or more for this model, got {max_bytes}")
        if max_retained < 0:
            raise SettingsError(f"max_retained must be 0 or more, got {max_retained}")
        self._model, self._max_bytes, self._max_retained = model, max_bytes, max_retained
        self._with_state = model if isinstance(model, Stateful) else None
        self._sharing = model if isinstance(model, Sharing) and model.shared_bytes(BLOCK_ROWS) else None
        self._state_bytes = sequence_bytes(model, 0)
        self.switch_len = model.switch_len if isinstance(model, LengthDependent) else None  # None: rows never change
        self._entries = Entries()
        self._running, self._retained = self._entries.running, self._entries.retained
        self._queries = self._hits = self._reused_tokens = self._read_tokens = 0
        self._prefixes = prefixes
        if prefixes is not None:
            prefixes.watch(self._entries)

    @property
    def stats(self) -> PoolStats:
        """Counters and memory as of now."""
        used_bytes, running_bytes = self._bytes_of(self._running, self._retained), self._bytes_of(self._running)
        return PoolStats(
            queries=self._queries,
            hits=self._hits,
            reused_tokens=self._reused_tokens,
            read_tokens=self._read_tokens,
            used_bytes=used_bytes,
            retained_bytes=used_bytes - running_bytes,
            num_open=len(self._running),
            num_retained=len(self._retained),
        )

    def can_ever_hold(self, num_rows: int) -> bool:
        """Return whether a sequence of so many rows fits if it is alone."""
        return num_rows <= self._model.max_rows and self._bytes(self._round(num_rows)) <= self._max_bytes

    def has_room(
        self,
        num_rows: int,
        token_ids: Sequence[int] = (),
        *,
        text_len: int = 0,
        without: int | None = None,
        num_lent: int = 0,
    ) -> bool:
        """Return whether a sequence of so many rows fits beside the running ones; retained ones give way.

        Args:
            token_ids, text_len: as for `open`: what the text shares with a running one takes no more memory.
            without: slot of a running one that would give way too.
            num_lent: rows that running ones lend, if that is known of a text that is not at hand.
        """
        others = {slot: entry for slot, entry in self._running.items() if slot != without}
        free_bytes, num_rounded = self._max_bytes - self._bytes_of(others), self._round(num_rows)
        if not self.can_ever_hold(num_rows) or self._bytes(num_rounded) <= free_bytes or self._sharing is None:
            return self.can_ever_hold(num_rows) and self._bytes(num_rounded) <= free_bytes
        num_lent = max(num_lent, self._lent_rows(others.values(), token_ids, num_rows, text_len))
        return self._new_bytes(num_rounded, num_lent) <= free_bytes

    def open(self, token_ids: Sequence[int], num_rows: int, *, text_len: int = 0) -> Opened:
        """Start a sequence for a text, with room for ``num_rows`` rows in all.

        Its first rows are copied from the sequence, running or retained, that shares the longest beginning with the
        text, if that is MIN_SHARED_TOKENS or more. At least the text's last token is left to be computed.

        Args:
            token_ids: the text so far; may be empty.
            text_len: length that decides whether the rows are those of a long text, if it is more than that of
                ``token_ids``.
        Raises: CapacityError if there is no room; nothing has changed, unless the device has none: all retained went.
        """
        if not self.has_room(num_rows, token_ids, text_len=text_len):
            raise CapacityError(
                f"{num_rows} KV rows do not fit: a sequence has at most {self._model.max_rows} rows, and"
                f" {self._bytes_of(self._running)} of {self._max_bytes} bytes are in use; wait for a sequence to end,"
                " or allow more KV memory",
                num_lent=self._lent_rows(self._running.values(), token_ids, num_rows, text_len),
            )
        is_long = self._is_long(max(len(token_ids), text_len))
        with self._entries.moving():
            opened = self._open(self._sharable(token_ids, num_rows), self._round(num_rows), is_long)
        self._queries += 1
        self._hits += opened.num_reused > 0
        self._reused_tokens += opened.num_reused
        return opened

    def note(self, slot: int, token_ids: Sequence[int]) -> None:
        """Say which text the first rows of a running sequence hold, so that others can copy them.

        These rows must be a chain and stay as they are until the next note, or until the sequence is closed: the
        committed text, not candidates. A note replaces the one before.

        Raises: ModelError if the sequence is not running or has fewer rows than the text has tokens.
        """
        self._running_entry(slot, token_ids).text = np.array(token_ids, np.int64)

    def drop_outgrown(self, slot: int, text_len: int) -> bool:
        """Drop the rows of a running sequence if a text of now ``text_len`` tokens has others, which take their place.

        Returns: whether they were dropped. Raises: ModelError if the sequence is not running.
        """
        entry = self._running_entry(slot, ())
        if entry.is_long or not self._is_long(text_len):
            return False
        with self._entries.moving():
            self._model.keep(slot, 0)
            self._make_long(slot)
            entry.text, entry.is_long = entry.text[:0], True
        return True

    def close(self, slot: int, token_ids: Sequence[int] = ()) -> None:
        """End a running sequence; its rows stay retained for a later text.

        Args:
            token_ids: the text that its first rows hold, a chain; later rows do not matter. Empty: nothing is retained.
        Raises: ModelError if the sequence is not running or has fewer rows than the text has tokens.
        """
        entry = self._running_entry(slot, token_ids)
        with self._entries.moving():
            self._close(entry, np.array(token_ids, np.int64))
        self._tell_leaving()

    def _close(self, entry: Entry, text: IntArray) -> None:
        entry.text, slot = text, entry.slot
        del self._running[slot]
        if len(entry.text) < MIN_SHARED_TOKENS or self._max_retained == 0 or self._entries.has_retained(entry):
            self._model.close(slot)
            return
        for other in list(self._retained.values()):
            if other.is_long == entry.is_long and common_length(other.text, entry.text) == len(other.text):
                self._drop(other)  # the new one can lend all that it could
        self._shrink(entry)
        self._retained[entry.slot] = entry
        while len(self._retained) > self._max_retained:
            self._drop(next(iter(self._retained.values())))

    def grow(self, slot: int, num_rows: int) -> int:
        """Move a running sequence, a chain, to a place for so many rows; return its slot there.

        For the moment of the copy both places are there, of which one is counted.

        Raises: CapacityError if there is no room, ModelError if the sequence is not running; nothing has changed then.
        """
        entry, num_rows = self._running_entry(slot, ()), self._round(num_rows)
        num_bytes = self._bytes_of(self._running) + self._bytes(num_rows) - self._bytes(entry.num_rows)
        with self._entries.moving():
            del self._running[slot]
            try:
                num_bytes -= self._bytes_of(self._running)  # what it shares with others it will share again
                entry.slot = self._make_slot(num_rows, entry.is_long, spared=None, num_bytes=num_bytes)
            except CapacityError:
                self._running[slot] = entry
                raise
            entry.num_rows = num_rows
            self._running[entry.slot] = entry
            self._model.copy_rows(slot, entry.slot, self._model.num_rows(slot))
            self._model.close(slot)
        return entry.slot

    def pause(self, slot: int) -> bool:
        """Give up the place of a running sequence, and its rows. Returns: whether they were those of a long text.

        Raises: ModelError if the sequence is not running.
        """
        entry = self._running_entry(slot, ())
        with self._entries.moving():
            del self._running[slot]
            self._model.close(slot)
        return entry.is_long

    def resume(self, num_rows: int, *, is_long: bool) -> int:
        """Open an empty sequence in place of a paused one. Raises: CapacityError if there is no room."""
        num_rows = self._round(num_rows)
        with self._entries.moving():
            slot = self._make_slot(num_rows, is_long, spared=None)
            self._running[slot] = Entry(slot, num_rows, np.empty(0, np.int64), is_long)
        return slot

    def clear(self) -> None:
        """Drop all retained sequences."""
        with self._entries.moving():
            while self._retained:
                self._drop(next(iter(self._retained.values())))

    def close_prefixes(self) -> None:
        """Write what is to outlive the process; see `PrefixCache.close`."""
        if self._prefixes is not None:
            self._prefixes.close()

    def _tell_leaving(self) -> None:
        """Say which sequence is dropped next, once the pool is half full."""
        if self._prefixes is None:
            return
        used = self._bytes_of(self._running, self._retained)
        if 2 * used > self._max_bytes or 2 * len(self._retained) > self._max_retained:
            for entry in self._retained.values():
                if not entry.is_told:
                    entry.is_told = True
                    self._prefixes.note_leaving(entry.text, is_long=entry.is_long)
                    return

    def _bytes_of(self, *groups: dict[int, Entry]) -> int:
        """Return the memory of sequences; what several share counts once."""
        entries = [entry for group in groups for entry in group.values()]
        if self._sharing is not None:
            return self._sharing.held_bytes([entry.slot for entry in entries])
        return sum(self._bytes(entry.num_rows) for entry in entries)

    def _new_bytes(self, num_rows: int, num_shared: int) -> int:
        """Return the memory that a new sequence takes whose first ``num_shared`` rows are another's."""
        return self._bytes(num_rows) - (0 if self._sharing is None else self._sharing.shared_bytes(num_shared))

    def _bytes(self, num_rows: int) -> int:
        return num_rows * self._model.row_bytes + self._state_bytes

    def _round(self, num_rows: int) -> int:
        return min(-(-max(num_rows, 1) // BLOCK_ROWS) * BLOCK_ROWS, self._model.max_rows)

    def _running_entry(self, slot: int, token_ids: Sequence[int]) -> Entry:
        if slot not in self._running:
            raise ModelError(f"slot {slot} is not running in this pool; running slots: {sorted(self._running)}")
        if len(token_ids) > self._model.num_rows(slot):
            raise ModelError(
                f"slot {slot} holds {self._model.num_rows(slot)} rows, too few for a text of {len(token_ids)} tokens;"
                " name only the tokens that have their rows"
            )
        return self._running[slot]

    def _is_long(self, text_len: int) -> bool:
        return self.switch_len is not None and text_len > self.switch_len

    def _make_long(self, slot: int) -> None:
        assert isinstance(self._model, LengthDependent)
        self._model.make_long(slot)

    def _open(self, text: IntArray, num_rows: int, is_long: bool) -> Opened:
        """Start a sequence of ``num_rows`` (whole blocks) that reuses what it can of ``text``."""
        if self._prefixes is not None and (read := self._read(self._prefixes, text, num_rows, is_long)) is not None:
            return read
        source, num_shared = self._entries.find(text, is_long, self._lendable)
        if self._prefixes is not None and source is not None:
            self._prefixes.note_shared(text[:num_shared], is_long=is_long)
        try:
            num_bytes = self._new_bytes(num_rows, num_shared)
            slot = self._make_slot(num_rows, is_long, spared=source, num_bytes=num_bytes)
        except CapacityError:
            if source is None or source.slot not in self._retained:
                raise
            if self._sharing is not None:
                with suppress(CapacityError):
                    return self._take_rows(source, num_shared, num_rows)
                return self._open(text, num_rows, is_long)  # a running one may share enough
            if not num_rows <= source.num_rows <= MAX_EXCESS * num_rows:
                self._drop(source)
                return self._open(text, num_rows, is_long)
            del self._retained[source.slot]
            self._model.keep(source.slot, num_shared)
            slot, num_rows = source.slot, source.num_rows
        else:
            if source is not None:
                self._model.copy_rows(source.slot, slot, num_shared)
                self._entries.touch(source)
        self._running[slot] = Entry(slot, num_rows, text[:num_shared].copy(), is_long)
        return Opened(slot, num_shared)

    def _take_rows(self, source: Entry, num_shared: int, num_rows: int) -> Opened:
        """Start a sequence in place of a retained one that does not fit beside it."""
        del self._retained[source.slot]
        try:
            slot = self._make_slot(num_rows, source.is_long, spared=None)
            self._model.copy_rows(source.slot, slot, num_shared)
        finally:
            self._model.close(source.slot)
        self._running[slot] = Entry(slot, num_rows, source.text[:num_shared].copy(), source.is_long)
        return Opened(slot, num_shared)

    def _read(self, prefixes: PrefixCache, text: IntArray, num_rows: int, is_long: bool) -> Opened | None:
        """Start a sequence with rows from a file, if one holds more of the text than memory does; None if not."""
        _, num_held = self._entries.find(text, is_long, self._lendable)
        while (prefix := prefixes.find(text, is_long=is_long, num_held=num_held)) is not None:
            try:
                slot = self._make_slot(num_rows, is_long, spared=None)
            except CapacityError:
                return None  # there may be room for what memory holds
            if prefixes.read(prefix[0], slot, prefix[1]):
                self._running[slot] = Entry(slot, num_rows, text[: prefix[1]].copy(), is_long)
                self._read_tokens += prefix[1]
                return Opened(slot, prefix[1])
            self._model.close(slot)  # a damaged file is not found again
        return None

    def _make_slot(self, num_rows: int, is_long: bool, spared: Entry | None, num_bytes: int | None = None) -> int:
        """Open a slot, dropping retained sequences other than ``spared``, until there is room.

        Args:
            num_bytes: memory that it takes; None: that of all its rows, as it will share none.
        """
        num_bytes = self._bytes(num_rows) if num_bytes is None else num_bytes
        is_retained = spared is not None and spared.slot in self._retained
        kept_bytes = self._bytes_of(self._running, {spared.slot: spared} if spared is not None and is_retained else {})
        if kept_bytes + num_bytes > self._max_bytes:
            raise CapacityError(f"{num_rows} KV rows do not fit beside {kept_bytes} of {self._max_bytes} bytes")
        droppable = [entry for entry in self._retained.values() if entry is not spared][::-1]
        while self._bytes_of(self._running, self._retained) + num_bytes > self._max_bytes:
            self._drop(droppable.pop())
        while True:
            try:
                return self._slot(num_rows, is_long)
            except CapacityError:  # the device has less memory than the pool was promised, or the model fewer slots
                if not droppable:
                    raise
                self._drop(droppable.pop())

    def _slot(self, num_rows: int, is_long: bool) -> int:
        """Return an empty sequence of the model. Raises: CapacityError if it has no memory."""
        slot = self._model.open(num_rows)
        if is_long:
            self._make_long(slot)
        return slot

    def _drop(self, retained: Entry) -> None:
        del self._retained[retained.slot]
        self._model.close(retained.slot)

    def _sharable(self, token_ids: Sequence[int], num_rows: int) -> IntArray:
        """Return what others' rows may be reused for: at least the last token of a text is computed."""
        return np.asarray(token_ids, np.int64)[: max(0, min(len(token_ids) - 1, num_rows))]

    def _lent_rows(self, others: Iterable[Entry], token_ids: Sequence[int], num_rows: int, text_len: int) -> int:
        """Return how many of the first rows of a text some other sequence can lend."""
        is_long, text = self._is_long(max(len(token_ids), text_len)), self._sharable(token_ids, num_rows)
        alike = (one for one in others if one.is_long == is_long)
        return max((self._lendable(one, common_length(one.text, text)) for one in alike), default=0)

    def _lendable(self, entry: Entry, num_rows: int) -> int:
        """Return how many of the first rows can be copied: those of a state are up to a place where it was kept."""
        return num_rows if self._with_state is None else self._with_state.lendable_rows(entry.slot, num_rows)

    def _shrink(self, entry: Entry) -> None:
        """Move a finished sequence, counted nowhere, to a smaller place if it wastes much and both fit for now."""
        needed = self._round(len(entry.text))
        is_cheap = self._sharing is not None and self._sharing.shared_bytes(needed) == self._bytes(needed)
        if needed == entry.num_rows or (not is_cheap and WORTH_SHRINKING * needed > entry.num_rows):
            return
        both = self._bytes_of(self._running, self._retained, {entry.slot: entry})
        if both + self._new_bytes(needed, len(entry.text)) > self._max_bytes:
            return
        try:
            slot = self._slot(needed, entry.is_long)
        except CapacityError:
            return  # it stays where it is
        self._model.copy_rows(entry.slot, slot, len(entry.text))
        self._model.close(entry.slot)
        entry.slot, entry.num_rows = slot, needed
