"""Contents of a `SequencePool`: its sequences, the texts that their rows hold, the search among them, and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from card.models.rows.row_tree import IntArray

MIN_SHARED_TOKENS = 8  # fewer are computed again: copying them saves nothing


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence: the room it takes, and the text that its first rows hold."""

    slot: int
    num_rows: int
    text: IntArray
    is_long: bool  # the rows are those of a text beyond `switch_len`; they fit no shorter one
    is_told: bool = False  # that it may leave soon


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence for a new text: its slot, and how many of the text's tokens have their rows already."""

    slot: int
    num_reused: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Contents of a pool now, and the number of texts found in it since it was made."""

    queries: int  # calls of open
    hits: int  # of these, how many reused rows
    reused_tokens: int
    read_tokens: int  # of these, how many came from files
    used_bytes: int  # running and retained sequences
    retained_bytes: int  # of these, what only retained sequences use
    num_open: int  # running sequences
    num_retained: int


class Entries:
    """The sequences of a pool. The thread of its model changes them; another one may look for rows meanwhile."""

    def __init__(self) -> None:
        self.running: dict[int, Entry] = {}
        self.retained: dict[int, Entry] = {}  # the least recently used first
        self.version = 0  # odd while rows are moved or dropped, and another number afterwards

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Let other threads know that rows are moved or dropped. Not to be nested."""
        self.version += 1
        try:
            yield
        finally:
            self.version += 1

    def listed(self, *, with_running: bool) -> list[Entry]:
        """Return the retained sequences, behind the running ones if these are wanted, for another thread."""
        return [*(list(self.running.values()) if with_running else ()), *list(self.retained.values())]

    def find(self, text: IntArray, is_long: bool, lendable: Callable[[Entry, int], int]) -> tuple[Entry | None, int]:
        """Return the sequence that shares the longest beginning with ``text``, and how many tokens that is.

        Args:
            lendable: tells how many of an entry's first rows can be copied.
        """
        best, most = None, MIN_SHARED_TOKENS - 1
        for entries in (self.running, self.retained):  # at a tie a running one: it is not in the way of others
            for entry in entries.values():
                if entry.is_long != is_long:
                    continue
                # To share more than `most` tokens, the token at that index must agree.
                if len(entry.text) > most and len(text) > most and entry.text[most] == text[most]:
                    num_shared = lendable(entry, common_length(entry.text, text))
                    if num_shared > most:
                        best, most = entry, num_shared
        return (best, most) if best else (None, 0)

    def touch(self, entry: Entry) -> None:
        """Count a retained sequence as used."""
        if entry.slot in self.retained:
            self.retained[entry.slot] = self.retained.pop(entry.slot)

    def has_retained(self, entry: Entry) -> bool:
        """Return whether a retained sequence can lend all of an entry's text, and count it as used if so."""
        alike = [other for other in self.retained.values() if other.is_long == entry.is_long]
        holder = next((other for other in alike if common_length(other.text, entry.text) == len(entry.text)), None)
        if holder is not None:
            self.touch(holder)
        return holder is not None


def common_length(one: IntArray, other: IntArray) -> int:
    """Return the length of the longest common beginning."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter
