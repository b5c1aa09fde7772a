"""Requests of an engine: who waits, who runs, and who is paused so that others have room.

A request that says how long its answer may be is taken up once there is room for that. Where memory is short, one that
does not, and with a store for rows any, gets room for as long a text as others had. What outgrows its room gets more;
if memory is full the youngest request gives its rows away, and comes back before anybody new is taken up. Requests keep
the order in which they were taken up: the oldest takes the room of all others if it must, so it comes to its end, and
then the next one does.
Source of the idea: SparseSpec, arXiv:2512.01278, its dynamic management of KV memory.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from card.engine.live import LiveRequest
from card.engine.request import Request, Update
from card.engine.row_moves import RowMoves
from card.engine.sequence import Work
from card.engine.target import TargetWorker
from card.errors import CapacityError, TargetError, in_words

logger = logging.getLogger(__name__)
GROWTH_TOKENS = 64  # by which a text may get longer before its room is looked at again
_IDLE_PREFILL_CHUNK = 512  # prompt tokens in one pass while no request is waiting for its next token
_FIRST_LENGTH = 256  # new tokens that are expected of an answer without a bound before any has come to its end
_MOST_LENGTHS = 64  # of texts that ended, from which the length of others is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the work that runs at once."""

    max_num_seqs: int = 16
    prefill_chunk: int = 64  # most prompt tokens in a pass that also decodes


class RequestQueue:
    """Takes up requests, first come first served, and shares the prompt tokens of a pass among them."""

    def __init__(self, worker: TargetWorker, limits: Limits) -> None:
        self._worker = worker
        self._limits = limits
        self._waiting: deque[LiveRequest] = deque()
        self.running: dict[int, LiveRequest] = {}
        self.paused: dict[int, LiveRequest] = {}  # their rows are in the worker's store
        self._lengths: deque[int] = deque(maxlen=_MOST_LENGTHS)  # new tokens of texts that came to their end
        self._num_taken_up = 0

    def __len__(self) -> int:
        return len(self.running) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Number of requests that do not run yet, or not now."""
        return len(self._waiting) + len(self.paused)

    def add(self, one: LiveRequest, now: float) -> None:
        """Let a checked request wait for its turn."""
        one.arrived_at = now
        self._waiting.append(one)

    def withdraw(self, request_id: int) -> Request | None:
        """Forget a request that was not taken up yet. Returns: what it was; None for any other one."""
        found = next((one for one in self._waiting if one.request_id == request_id), None)
        if found is None:
            return None
        self._waiting.remove(found)
        return found.request

    def find(self, request_id: int) -> LiveRequest | None:
        """Return a request that was taken up, also a paused one; None for any other one."""
        return self.running.get(request_id) or self.paused.get(request_id)

    def leave(self, request_id: int, *, is_finished: bool) -> LiveRequest:
        """Take out a request that was taken up; the length of a text that came to its end is remembered."""
        one = self.running.pop(request_id, None) or self.paused.pop(request_id)
        if is_finished:
            self._lengths.append(one.sequence.num_new_tokens)
        return one

    def make_room_to_grow(self) -> None:
        """Give each running request room for its next passes, the oldest first; pause the youngest for it."""
        moves = self._worker.moves
        if moves is None:
            return
        for one in sorted(self.running.values(), key=lambda one: one.age):
            while one.request_id in self.running and not self._has_rows(one, moves):
                youngest = max((each for each in self.running.values() if each.can_move), key=lambda each: each.age)
                moves.pause(youngest.sequence, may_drop=True)
                youngest.was_pushed_out = True
                self.paused[youngest.request_id] = self.running.pop(youngest.request_id)

    def admit(self, now: float, num_restarts: int) -> tuple[list[LiveRequest], list[Update]]:
        """Take up waiting requests while there is room and prompts do not pile up; let paused ones go on.

        A request stays outside until its prompt's turn comes, so that it can reuse what others read meanwhile.

        Args:
            now: seconds of the engine's clock.
            num_restarts: of the drafter until now.
        Returns: those taken up, and the failure of those that the device has no memory for though nothing else runs.
        """
        taken_up, refused = list[LiveRequest](), list[Update]()
        backlog = sum(self._prompts_left())
        while len(self.running) < self._limits.max_num_seqs and backlog < self._limits.prefill_chunk:
            one = self._waiting[0] if self._waiting else None
            if one is None or self._is_turn_of_paused(one) or not self._has_room(one, now):
                if (resumed := self._resume()) is None:
                    break
                backlog += resumed.sequence.prompt_tokens_left
                continue
            try:
                sequence = self._worker.add(one, self._rows_at_first(one))
            except CapacityError as error:
                if self.running:
                    break  # some of them will leave
                refused.append(_failure_of(one.request, f"the request cannot be taken up: {error}"))
            except Exception as error:
                logger.error("a request cannot be taken up: %s", in_words(error), exc_info=error)
                refused.append(_failure_of(one.request, f"the request cannot be taken up: {in_words(error)}"))
            else:
                self._num_taken_up += 1
                one.take_up(sequence, now, num_restarts=num_restarts, age=self._num_taken_up)
                self.running[one.request_id] = one
                taken_up.append(one)
                backlog += sequence.prompt_tokens_left
            self._waiting.popleft()
        return taken_up, refused

    @property
    def stranded_id(self) -> int | None:
        """Number of a paused request that finds no room though nothing else has any; None: there is none."""
        is_alone = not self.running and not self._worker.pool.stats.num_open  # texts to be scored have rows, too
        oldest = self._oldest_paused
        return oldest.request_id if is_alone and oldest is not None else None

    def only_reads(self, min_tokens: int) -> bool:
        """Return whether so many tokens of prompts are left to read, and nobody waits for a next token."""
        left = self._prompts_left()
        return 0 not in left and sum(left) >= min_tokens

    def plan_prefill(self) -> list[Work]:
        """Share the prompt tokens of this pass among the prompts, oldest first."""
        left = self._prompts_left()
        chunk = self._limits.prefill_chunk if 0 in left else _IDLE_PREFILL_CHUNK
        work = []
        for one, num_left in zip(self.running.values(), left, strict=True):
            if num_left and chunk and not one.sequence.is_held_up:
                work.append(Work(one.sequence, num_prompt_tokens=min(num_left, chunk)))
                chunk -= min(num_left, chunk)
        return work

    def _prompts_left(self) -> list[int]:
        return [one.sequence.prompt_tokens_left for one in self.running.values()]

    @property
    def _oldest_paused(self) -> LiveRequest | None:
        return min(self.paused.values(), key=lambda one: one.age, default=None)

    def _has_rows(self, one: LiveRequest, moves: RowMoves) -> bool:
        """Return whether a running request has room for its next passes, perhaps since it got more just now."""
        sequence, rows_for = one.sequence, one.rows_for
        num_tokens = len(sequence.token_ids)
        if self._worker.model.capacity(sequence.slot) >= (needed := rows_for(num_tokens)):
            return True
        return any(moves.grow(sequence, num_rows) for num_rows in (rows_for(num_tokens + GROWTH_TOKENS), needed))

    def _rows_at_first(self, one: LiveRequest) -> int:
        """Return the KV rows that a request is taken up with."""
        request, moves = one.request, self._worker.moves
        has_longest = request.is_bounded and not (self._lengths and moves is not None and moves.has_store)
        if moves is None or request.images is not None or has_longest:
            return one.num_rows
        expected = sum(self._lengths) // len(self._lengths) if self._lengths else _FIRST_LENGTH
        return one.rows_for(len(request.prompt_ids) + max(1, min(expected, request.params.max_tokens)))

    def _is_turn_of_paused(self, newcomer: LiveRequest) -> bool:
        """Return whether paused requests come before a waiting one.

        One that an older one took the room of does; one that made room for shorter ones does if that one came later.
        """
        return any(one.was_pushed_out or one.gave_way_before(newcomer.arrived_at) for one in self.paused.values())

    def _resume(self) -> LiveRequest | None:
        """Let the oldest paused request go on. Returns: it; None without one, or without room for it."""
        one = self._oldest_paused
        if one is None or self._worker.moves is None:
            return None
        num_rows = one.rows_for(len(one.sequence.token_ids) + GROWTH_TOKENS)
        if not self._worker.moves.resume(one.sequence, num_rows):
            return None
        one.was_pushed_out = False
        self.running[one.request_id] = self.paused.pop(one.request_id)
        return one

    def _has_room(self, newcomer: LiveRequest, now: float) -> bool:
        """Return whether there is room for a waiting request, perhaps that of a running one, which is paused."""
        return self._worker.pool.has_room(self._rows_at_first(newcomer)) or self._make_room(newcomer, now)

    def _make_room(self, newcomer: LiveRequest, now: float) -> bool:
        """Pause the running request with the most tokens to go, if the newcomer wants fewer. Returns: whether it was.

        No request is paused for a shorter one twice. Only requests that waited then overtake it.
        """
        moves = self._worker.moves
        able = [one for one in self.running.values() if one.can_give_way]
        longest = max(able, key=lambda one: one.tokens_left, default=None)
        if moves is None or not moves.has_store or longest is None:
            return False
        if longest.tokens_left <= newcomer.request.params.max_tokens:
            return False
        if not self._worker.pool.has_room(self._rows_at_first(newcomer), without=longest.sequence.slot):
            return False
        longest.gave_way_at = now  # whether there is room in the store or not: it is tried once
        if not moves.pause(longest.sequence, may_drop=False):
            return False
        self.paused[longest.request_id] = self.running.pop(longest.request_id)
        return True


def _failure_of(request: Request, reason: str) -> Update:
    return Update(request.request_id, (), "error", request.new_stats(), TargetError(reason))
