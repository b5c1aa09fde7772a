"""The drafting side: a state machine that turns the target's messages into layers of candidates.

No thread, socket, sleep or clock in here: `receive` takes a message, `step` makes one drafter pass; both return what
is to be sent. Whoever drives it decides when.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from card.errors import CapacityError, CardError, ModelError, ProtocolError, in_words
from card.protocol.messages import (
    MAX_LEN,
    Close,
    Correction,
    Declined,
    DrafterMessage,
    DraftSpec,
    Layer,
    Open,
    Ping,
    Pong,
    Resync,
    Shutdown,
    TargetMessage,
    check_correction,
    check_spec,
)
from card.tree.nodes import NewNodes
from card.writers.protocol import DraftSequence, DraftWriter

logger = logging.getLogger(__name__)
MAX_REQUESTS = 64  # open at once, of one target
MAX_TOKENS_PER_PASS = 256  # a longer text is read in several passes, so that others, and pings, are not kept waiting
V = TypeVar("V")
_NEVER = (-math.inf, 0)
_MAX_REMEMBERED = 1024  # closed requests, and as many turned away or declined: a late message revives none of them
_STALE_ROUNDS = 32  # a request is stale after so many messages about each other one, and none about itself
_MIN_REPEATED_TOKENS = 64  # a correction of so many tokens is answered: the target does not know what has arrived


@dataclass(slots=True)
class _RequestCounters:
    """Numbers that the target has seen of one request. They go on when its sequence is closed and opened again."""

    spec: DraftSpec
    next_seq: int = 0
    next_epoch: int = 0
    num_passes: int = 0
    busy_s: float = 0.0
    num_dropped: int = 0  # by earlier sequences
    num_rolled_back: int = 0  # the same


class _Drafting:
    """One open request: its sequence and what has been said about it."""

    def __init__(self, sequence: DraftSequence, counters: _RequestCounters) -> None:
        self.sequence = sequence
        self.counters = counters
        self.heard_at = 0  # number of the message that told of it last
        self.served_at = _NEVER  # when its last pass began, and its place in it

    def close(self) -> _RequestCounters:
        """Give the rows back and return what a later sequence of this request goes on from."""
        self.sequence.close()
        self.counters.next_epoch = self.sequence.cache.epoch + 1
        self.counters.spec = self.sequence.spec
        self.counters.num_dropped += self.sequence.num_dropped
        self.counters.num_rolled_back += self.sequence.num_rolled_back
        return self.counters

    def layer(
        self, request_id: int, nodes: NewNodes, *, is_reset: bool, span_s: tuple[float, float] | None = None
    ) -> Layer:
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


@dataclass(slots=True)
class _Task:
    """The part of a request that can run in the next pass."""

    worker: DrafterWorker
    request_id: int
    drafting: _Drafting
    num_tokens: int


class DrafterWorker:
    """Drafts for any number of requests of one target; owns the truth about each candidate tree.

    A request that finds no room is turned away, and asked for again when there is room. It may take the place of a
    request that the target seems to have forgotten, or of one of a worker that holds more memory, as long as that one
    still holds no less afterwards. So no worker starves, and no two turn each other out for ever.

    A text that the draft model cannot follow is declined: it has tokens that the model lacks, or more than the model or
    the memory takes, or a pass over it fails. That request goes on without the drafter, and no other notices.
    """

    def __init__(
        self,
        writer: DraftWriter,
        *,
        clock: Callable[[], float],
        max_requests: int = MAX_REQUESTS,
        max_tokens_per_pass: int = MAX_TOKENS_PER_PASS,
        peers: Callable[[], Iterable[DrafterWorker]] = tuple,
    ) -> None:
        """Make a worker without requests.

        Args:
            clock: seconds; only to report how long passes took and to take turns.
            max_requests: most requests open at once.
            max_tokens_per_pass: a longer text is run in several passes.
            peers: returns the workers that share the writer's memory.
        """
        self.is_shut_down = False
        self.is_idle = True  # a step would do nothing: every tree is as deep as its lead, or cannot grow
        self.writer = writer
        self._clock = clock
        self._max_requests = max_requests
        self._max_tokens_per_pass = max_tokens_per_pass
        self._peers = peers
        self._served_at = _NEVER  # when the last pass for this worker began, and its place in it
        self._num_messages = 0  # about open requests
        self.drafting: dict[int, _Drafting] = {}  # least recently corrected first
        self._closed: dict[int, None] = {}  # a late message does not revive them
        self._turned_away: dict[int, _RequestCounters] = {}
        self._declined: dict[int, str] = {}  # why; said again to a target that did not hear it

    @property
    def layers_per_pass(self) -> int:
        """Most layers that a step adds to a tree."""
        return self.writer.layers_per_pass

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self.drafting)

    @property
    def num_rows(self) -> int:
        """KV rows that the open requests have room for."""
        return sum(drafting.sequence.num_rows for drafting in self.drafting.values())

    def receive(self, message: TargetMessage) -> list[DrafterMessage]:
        """Take one message of the target and return the replies.

        Raises: ProtocolError if the message is none that a target sends, or holds a spec that cannot be followed.
        """
        self.is_idle = False
        match message:
            case Open():
                return self._receive_open(message)
            case Correction():
                return self._receive_correction(message)
            case Close(request_id=request_id):
                self._close(request_id)
                return []
            case Ping(nonce=nonce):
                return [Pong(nonce)]
            case Shutdown():
                for request_id in list(self.drafting):
                    self._close(request_id)
                self.is_shut_down = True
                return []
        raise ProtocolError("a drafter takes the messages of a target, and this is another one")

    def step(self) -> list[DrafterMessage]:
        """Make one drafter pass for the open requests that have something to expand.

        Raises: what the draft model raises, if it cannot run any text.
        """
        (messages,) = step_together([self], max_tokens=self._max_tokens_per_pass)
        return messages

    def _tasks(self) -> list[_Task]:
        """Return what there is to do, least recently served first."""
        wanted = [(i, drafting, drafting.sequence.num_tokens_to_run()) for i, drafting in self.drafting.items()]
        tasks = [_Task(self, i, drafting, num_tokens) for i, drafting, num_tokens in wanted if num_tokens]
        self.is_idle = not tasks
        return sorted(tasks, key=lambda task: task.drafting.served_at)

    def _receive_open(self, message: Open) -> list[DrafterMessage]:
        check_spec(message.spec)
        request_id, known = message.request_id, self.drafting.get(message.request_id)
        if request_id in self._closed or (known and len(known.sequence.token_ids) >= len(message.token_ids)):
            return []  # a repeated or late message
        if not message.token_ids or len(message.token_ids) >= message.spec.max_len:
            self._close(request_id)  # nothing to draft from, or the text is at its end
            return []
        reason = self._declined.get(request_id) or self._fault(message.token_ids, len(message.token_ids))
        if not reason and not self.writer.can_ever_hold(message.spec):
            num_rows = self.writer.rows_of(message.spec)
            reason = f"the text may take {num_rows} KV rows, more than the drafter's memory holds"
        if reason:
            return self._decline(request_id, reason)
        counters = self.drafting.pop(request_id).close() if known else self._turned_away.pop(request_id, None)
        counters = counters or _RequestCounters(message.spec)
        sequence = self._make_sequence(message, counters.next_epoch)
        if sequence is None:
            counters.spec = message.spec
            _remember(self._turned_away, request_id, counters)
            return []
        drafting = _Drafting(sequence, counters)
        self._hear(request_id, drafting)
        return [drafting.layer(request_id, NewNodes.none(), is_reset=True)]

    def _make_sequence(self, message: Open, epoch: int) -> DraftSequence | None:
        """Return a sequence, if need be in the place of forgotten requests; None if there is no room."""
        while True:
            if len(self.drafting) < self._max_requests:
                try:
                    return self.writer.open(message.token_ids, message.spec, epoch=epoch)
                except CapacityError:
                    pass
            if not self._can_make_room(message.spec):
                return None
            self._make_room(message.spec)

    def _can_make_room(self, spec: DraftSpec) -> bool:
        return self._stale() is not None or self._richer_peer(spec) is not None

    def _make_room(self, spec: DraftSpec) -> None:
        """Close one request that has less right to its place than a new one of this spec."""
        stale, peer = self._stale(), self._richer_peer(spec)
        if stale is not None:
            self._turn_out(stale)
        elif peer is not None:
            peer._turn_out(next(iter(peer.drafting)))

    def _turn_out(self, request_id: int) -> None:
        _remember(self._turned_away, request_id, self.drafting.pop(request_id).close())

    def _richer_peer(self, spec: DraftSpec) -> DrafterWorker | None:
        """Return a worker that could close its oldest request for this one and still hold no less than this worker."""
        if len(self.drafting) >= self._max_requests:
            return None
        richest = max(self._peers(), key=lambda peer: peer.num_rows, default=self)
        oldest = next(iter(richest.drafting.values()), None)
        if oldest is None or richest.num_rows - oldest.sequence.num_rows < self.num_rows + self.writer.rows_of(spec):
            return None
        return richest

    def _stale(self) -> int | None:
        """Return the open request that its target has not told of for longest, if that is suspiciously long."""
        for request_id, drafting in self.drafting.items():
            silence = self._num_messages - drafting.heard_at
            return request_id if silence > _STALE_ROUNDS * len(self.drafting) else None
        return None

    def _hear(self, request_id: int, drafting: _Drafting) -> None:
        drafting.heard_at = self._num_messages
        self.drafting.pop(request_id, None)
        self.drafting[request_id] = drafting

    def _receive_correction(self, message: Correction) -> list[DrafterMessage]:
        check_correction(message)
        self._num_messages += 1
        request_id, known = message.request_id, self.drafting.get(message.request_id)
        if known is None:
            return self._ask_for(request_id)
        self._hear(request_id, known)
        known_len = len(known.sequence.token_ids)
        if message.start > known_len:
            return [Resync(request_id, known_len)]
        new_ids = message.token_ids[known_len - message.start :]
        reason = self._fault(new_ids, known_len + len(new_ids))
        if reason:
            return self._decline(request_id, reason)
        if message.start + len(message.token_ids) >= known_len:  # not overtaken by a newer one: what it wants holds
            known.sequence.reshape(beam_width=message.beam_width, branch_below=message.branch_below)
        if known_len + len(new_ids) > known.sequence.spec.max_len:
            raise ProtocolError(
                f"the text of request {request_id} has {known_len + len(new_ids)} tokens; its draft spec said that it "
                f"gets {known.sequence.spec.max_len} at most"
            )
        replies: list[DrafterMessage] = []
        if new_ids:
            from_secondary = known.sequence.commit(new_ids)
            if from_secondary is None:
                replies.append(known.layer(request_id, NewNodes.none(), is_reset=True))
            elif from_secondary.ids:
                replies.append(known.layer(request_id, from_secondary, is_reset=False))
        if message.wants_snapshot:
            replies.append(known.layer(request_id, known.sequence.cache.snapshot(), is_reset=True))
        if not replies and len(message.token_ids) >= _MIN_REPEATED_TOKENS:
            replies.append(known.layer(request_id, NewNodes.none(), is_reset=False))
        return replies

    def _ask_for(self, request_id: int) -> list[DrafterMessage]:
        """Ask for a request that is not open, unless it is over or there is still no room for it."""
        if request_id in self._closed:
            return []
        if request_id in self._declined:
            return [Declined(request_id, self._declined[request_id])]
        counters = self._turned_away.get(request_id)
        if counters is not None and not self._can_make_room(counters.spec):
            has_place = len(self.drafting) < self._max_requests
            if not (has_place and self.writer.has_room(counters.spec)):
                return []
        return [Resync(request_id, None)]

    def _close(self, request_id: int) -> None:
        drafting = self.drafting.pop(request_id, None)
        if drafting:
            drafting.sequence.close()
        self._turned_away.pop(request_id, None)
        self._declined.pop(request_id, None)
        _remember(self._closed, request_id, None)

    def _fault(self, new_ids: Sequence[int], length: int) -> str:
        """Return why the draft model cannot follow a text; empty if it can.

        Args:
            new_ids: those of its tokens that were not looked at yet.
            length: tokens of the whole text.
        """
        vocab_size, longest = self.writer.vocab_size, min(self.writer.max_model_len, MAX_LEN)
        foreign = next((token_id for token_id in new_ids if not 0 <= token_id < vocab_size), None)
        if foreign is not None:
            return f"the draft model has no token {foreign}: its tokens are 0 to {vocab_size - 1}"
        if length >= longest:
            return f"the text has {length} tokens, and the draft model's context holds {longest}"
        return ""

    def _decline(self, request_id: int, reason: str, *, has_failed: bool = False) -> list[DrafterMessage]:
        """Draft no more for a request, and say so to its target."""
        drafting = self.drafting.pop(request_id, None)
        if drafting and has_failed:
            drafting.sequence.discard()
        elif drafting:
            drafting.sequence.close()
        self._turned_away.pop(request_id, None)
        _remember(self._declined, request_id, reason)
        return [Declined(request_id, reason)]


def step_together(workers: Sequence[DrafterWorker], *, max_tokens: int | None = None) -> list[list[DrafterMessage]]:
    """Make one drafter pass for all workers, which share one writer; each gets a fair part of its tokens.

    Whoever wants less than its part leaves the rest to the others. Within a worker, and where there are more workers
    than tokens, those come first that have waited for longest.

    Args:
        max_tokens: most tokens of the pass, 1 or more; None sets no limit.
    Returns: per worker what is to be sent.
    Raises: what the draft model raises, if it cannot run any text.
    """
    clock = workers[0]._clock
    started = clock()
    wanted = [worker._tasks() for worker in workers]
    active = sorted((tasks for tasks in wanted if tasks), key=lambda tasks: tasks[0].worker._served_at)
    chosen = [task for tasks in active for task in tasks] if max_tokens is None else _fair_part(active, max_tokens)
    results: dict[int, list[DrafterMessage]] = {id(worker): [] for worker in workers}
    if chosen:
        grown = _grown(workers[0].writer, chosen)
        ended = clock()
        busy_s = (ended - started) / len(chosen)
        for i, (task, nodes) in enumerate(zip(chosen, grown, strict=True)):
            task.worker._served_at = task.drafting.served_at = (started, i)
            task.drafting.counters.num_passes += 1
            task.drafting.counters.busy_s += busy_s
            said = results[id(task.worker)]
            if isinstance(nodes, CardError):
                reason = f"the draft model failed at it: {in_words(nodes)}"
                said += task.worker._decline(task.request_id, reason, has_failed=True)
            elif nodes.ids:
                layer = task.drafting.layer
                said.append(layer(task.request_id, nodes, is_reset=False, span_s=(started, ended)))
    return [results[id(worker)] for worker in workers]


def _grown(writer: DraftWriter, tasks: Sequence[_Task]) -> list[NewNodes | CardError]:
    """Make a pass; if it fails, find the requests that it fails for and run the others without them.

    Returns: the new nodes of each task; the error of one that fails alone, while the model runs other text.
    Raises: what the model raises, if it runs no text at all.
    """
    try:
        return writer.step([(task.drafting.sequence, task.num_tokens) for task in tasks])
    except (CardError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
        if len(tasks) == 1:
            writer.check()
            logger.warning("a drafter pass failed for one request, which goes on without drafts: %s", in_words(error))
            return [error if isinstance(error, CardError) else ModelError(in_words(error))]
        logger.info("a drafter pass for %d requests failed: %s", len(tasks), in_words(error))
    middle = len(tasks) // 2
    return [*_grown(writer, tasks[:middle]), *_grown(writer, tasks[middle:])]


def _fair_part(wanted: Sequence[list[_Task]], max_tokens: int) -> list[_Task]:
    """Return the tasks of each worker that fit into its part of ``max_tokens``, the last one cut to fit."""
    taking_part = sorted(wanted[:max_tokens], key=lambda tasks: sum(task.num_tokens for task in tasks))
    left = max_tokens
    chosen: list[_Task] = []
    for i, tasks in enumerate(taking_part):
        part = left // (len(taking_part) - i)
        for task in tasks:
            task.num_tokens = min(task.num_tokens, part)
            if task.num_tokens:
                chosen.append(task)
            part -= task.num_tokens
            left -= task.num_tokens
    return chosen


def _remember(of: dict[int, V], request_id: int, value: V) -> None:
    of[request_id] = value
    if len(of) > _MAX_REMEMBERED:
        of.pop(next(iter(of)))
