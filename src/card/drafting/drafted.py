"""Requests of a drafter: open, turned away or declined ones, and which open one must make room for another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from card.drafting.messages import DraftSpec, Layer, Open
from card.drafting.protocol import DraftSequence, DraftWriter
from card.errors import CapacityError
from card.tree.nodes import NewNodes

V = TypeVar("V")
NEVER = (-math.inf, 0)
_MAX_REMEMBERED = 1024  # closed requests, and as many refused ones, whose late messages must not reopen them
_STALE_ROUNDS = 32  # messages about every other request, and none about this one, after which it is stale


@dataclass(slots=True)
class Counters:
    """Numbers of one request reported to the target. They continue when its sequence is closed and opened again."""

    spec: DraftSpec
    next_seq: int = 0
    next_epoch: int = 0
    num_passes: int = 0
    busy_s: float = 0.0
    num_dropped: int = 0  # by earlier sequences
    num_rolled_back: int = 0  # the same
    num_lent: int = 0  # rows that others would have lent it when it found no room


class Drafting:
    """One open request: its sequence, and the messages about it."""

    def __init__(self, sequence: DraftSequence, counters: Counters) -> None:
        self.sequence = sequence
        self.counters = counters
        self.heard_at = 0  # number of the last message about it
        self.served_at = NEVER  # start of its last pass, and its place in that pass

    def close(self) -> Counters:
        """Free the rows. Returns: the counters, from which a later sequence of this request continues."""
        self.sequence.close()
        self.counters.next_epoch = self.sequence.cache.epoch + 1
        self.counters.spec = self.sequence.spec
        self.counters.num_dropped += self.sequence.num_dropped
        self.counters.num_rolled_back += self.sequence.num_rolled_back
        return self.counters

    def layer(
        self, request_id: int, nodes: NewNodes, *, is_reset: bool, span_s: tuple[float, float] | None = None
    ) -> Layer:
        """Return the next message about the tree."""
        counters, cache = self.counters, self.sequence.cache
        counters.next_seq += 1
        return Layer(
            request_id=request_id,
            seq=counters.next_seq - 1,
            epoch=cache.epoch,
            is_reset=is_reset,
            root_id=cache.root_id,
            root_position=self.sequence.root_position,
            known_len=len(self.sequence.token_ids),
            nodes=nodes,
            num_passes=counters.num_passes,
            busy_s=counters.busy_s,
            num_reused=self.sequence.num_reused,
            num_dropped=counters.num_dropped + self.sequence.num_dropped,
            num_rolled_back=counters.num_rolled_back + self.sequence.num_rolled_back,
            pass_span_s=span_s,
        )


class DraftedRequests:
    """The requests of one target that a drafter knows.

    A request that finds no room is turned away. It may replace a request that the target seems to have forgotten. It
    may also replace a request of a worker that holds more memory, if that worker still holds no less afterwards. So no
    worker starves, and no two workers keep replacing each other's requests.
    """

    def __init__(self, writer: DraftWriter, max_requests: int, peers: Callable[[], Iterable[DraftedRequests]]) -> None:
        """Begin without requests.

        Args:
            max_requests: most requests open at once.
            peers: returns the requests of all workers that share the writer's memory.
        """
        self._writer = writer
        self._max_requests = max_requests
        self._peers = peers
        self._num_messages = 0  # about open requests
        self.open: dict[int, Drafting] = {}  # least recently corrected first
        self._closed: dict[int, None] = {}  # a late message must not reopen them
        self._turned_away: dict[int, Counters] = {}
        self._declined: dict[int, str] = {}  # reason; repeated to a target that missed it

    @property
    def num_rows(self) -> int:
        """KV rows that the open requests have room for."""
        return sum(drafting.sequence.num_rows for drafting in self.open.values())

    def is_closed(self, request_id: int) -> bool:
        """Return whether a request was closed."""
        return request_id in self._closed

    def why_declined(self, request_id: int) -> str | None:
        """Return why a request was declined; None if it was not."""
        return self._declined.get(request_id)

    def begin(self, message: Open) -> Drafting | None:
        """Open a request, if needed in place of another; an open one starts over.

        Returns: the request; None if there is no room, and the request is then turned away.
        """
        request_id, known = message.request_id, self.open.pop(message.request_id, None)
        counters = known.close() if known else self._turned_away.pop(request_id, None)
        counters = counters or Counters(message.spec)
        sequence = self._make_sequence(message, counters)
        if sequence is None:
            counters.spec = message.spec
            _remember(self._turned_away, request_id, counters)
            return None
        drafting = Drafting(sequence, counters)
        self._mark_heard(request_id, drafting)
        return drafting

    def hear_of(self, request_id: int) -> Drafting | None:
        """Note a message about a request, and return the request if it is open."""
        self._num_messages += 1
        drafting = self.open.get(request_id)
        if drafting is not None:
            self._mark_heard(request_id, drafting)
        return drafting

    def close(self, request_id: int) -> None:
        """Close a request for good."""
        drafting = self.open.pop(request_id, None)
        if drafting:
            drafting.sequence.close()
        self._turned_away.pop(request_id, None)
        self._declined.pop(request_id, None)
        _remember(self._closed, request_id, None)

    def decline(self, request_id: int, reason: str, *, has_failed: bool) -> None:
        """Stop drafting for a request. ``has_failed``: its rows may be wrong."""
        drafting = self.open.pop(request_id, None)
        if drafting and has_failed:
            drafting.sequence.discard()
        elif drafting:
            drafting.sequence.close()
        self._turned_away.pop(request_id, None)
        _remember(self._declined, request_id, reason)

    def may_find_room(self, request_id: int) -> bool:
        """Return whether a request that is not open may find room now; True if it was never turned away."""
        counters = self._turned_away.get(request_id)
        if counters is None or self._can_make_room(counters.spec):
            return True
        return len(self.open) < self._max_requests and self._writer.has_room(counters.spec, num_lent=counters.num_lent)

    def _mark_heard(self, request_id: int, drafting: Drafting) -> None:
        drafting.heard_at = self._num_messages
        self.open.pop(request_id, None)
        self.open[request_id] = drafting

    def _make_sequence(self, message: Open, counters: Counters) -> DraftSequence | None:
        """Return a sequence, if needed in place of forgotten requests; None if there is no room."""
        while True:
            if len(self.open) < self._max_requests:
                try:
                    return self._writer.open(message.token_ids, message.spec, epoch=counters.next_epoch)
                except CapacityError as error:
                    counters.num_lent = error.num_lent
            if not self._can_make_room(message.spec):
                return None
            self._make_room(message.spec)

    def _can_make_room(self, spec: DraftSpec) -> bool:
        return self._stale() is not None or self._richer_peer(spec) is not None

    def _make_room(self, spec: DraftSpec) -> None:
        """Close one request whose place a new one of this spec may take."""
        stale, peer = self._stale(), self._richer_peer(spec)
        if stale is not None:
            self._turn_out(stale)
        elif peer is not None:
            peer._turn_out(next(iter(peer.open)))

    def _turn_out(self, request_id: int) -> None:
        _remember(self._turned_away, request_id, self.open.pop(request_id).close())

    def _richer_peer(self, spec: DraftSpec) -> DraftedRequests | None:
        """Return a peer that could close its oldest request for this one and still hold no less than this worker."""
        if len(self.open) >= self._max_requests:
            return None
        richest = max(self._peers(), key=lambda peer: peer.num_rows, default=self)
        oldest = next(iter(richest.open.values()), None)
        if oldest is None or richest.num_rows - oldest.sequence.num_rows < self.num_rows + self._writer.rows_of(spec):
            return None
        return richest

    def _stale(self) -> int | None:
        """Return the open request that the target has not mentioned for longest, if that is long enough to be stale."""
        for request_id, drafting in self.open.items():
            silence = self._num_messages - drafting.heard_at
            return request_id if silence > _STALE_ROUNDS * len(self.open) else None
        return None


def _remember(remembered: dict[int, V], request_id: int, value: V) -> None:
    remembered[request_id] = value
    if len(remembered) > _MAX_REMEMBERED:
        remembered.pop(next(iter(remembered)))
