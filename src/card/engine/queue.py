"""Requests of an engine: waiting, running, and paused ones that have made room for others.

A request that states the length of its answer is admitted once there is room for that length. Without a stated length
where memory is short, or always with a store for rows, it gets room for the length that other answers had. A text that
outgrows its room gets more. If memory is full, the youngest request gives its rows away; it resumes before any new
request is admitted. Requests keep the order of their admission: the oldest may take the room of all others, so it
always finishes, and then the next one does.
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
GROWTH_TOKENS = 64  # growth of a text before its room is checked again
# Prompt tokens in one pass while no request is waiting for its next token. From 64 rows a thread on pieces cost alike
# (benchmarks/LOG.md); longer ones only let newcomers wait.
_IDLE_PREFILL_CHUNK = 512
_FIRST_LENGTH = 256  # expected new tokens of an unbounded answer before any has finished
_MOST_LENGTHS = 64  # finished texts from which the length of others is estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the work that runs at once."""

    max_num_seqs: int = 16
    prefill_chunk: int = 64  # most prompt tokens in a pass that also decodes


class RequestQueue:
    """Admits requests in order of arrival, and shares the prompt tokens of a pass among them."""

    def __init__(self, worker: TargetWorker, limits: Limits) -> None:
        self._worker = worker
        self._limits = limits
        self._waiting: deque[LiveRequest] = deque()
        self.running: dict[int, LiveRequest] = {}
        self.paused: dict[int, LiveRequest] = {}  # their rows are in the worker's store
        self._lengths: deque[int] = deque(maxlen=_MOST_LENGTHS)  # new tokens of finished texts
        self._num_taken_up = 0

    def __len__(self) -> int:
        return len(self.running) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not running: waiting or paused."""
        return len(self._waiting) + len(self.paused)

    def add(self, one: LiveRequest, now: float) -> None:
        """Queue a checked request."""
        one.arrived_at = now
        self._waiting.append(one)

    def withdraw(self, request_id: int) -> Request | None:
        """Drop a request that was not admitted yet. Returns: the request; None for any other."""
        waiting = next((one for one in self._waiting if one.request_id == request_id), None)
        if waiting is None:
            return None
        self._waiting.remove(waiting)
        return waiting.request

    def find(self, request_id: int) -> LiveRequest | None:
        """Return an admitted request, running or paused; None for any other."""
        return self.running.get(request_id) or self.paused.get(request_id)

    def leave(self, request_id: int, *, is_finished: bool) -> LiveRequest:
        """Remove an admitted request; the length of a finished text is remembered."""
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
        """Admit waiting requests while there is room and prompts do not pile up; resume paused ones.

        A request stays in the queue until its prompt's turn comes, so that it can reuse rows of other prompts.

        Args:
            now: seconds of the engine's clock.
            num_restarts: restarts of the drafter so far.
        Returns: the admitted ones, and failures of those that the device lacks memory for though nothing else runs.
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
                    break  # running ones will finish
                refused.append(_failure_of(one.request, f"the request cannot be admitted: {error}"))
            except Exception as error:
                logger.error("a request cannot be admitted: %s", in_words(error), exc_info=error)
                refused.append(_failure_of(one.request, f"the request cannot be admitted: {in_words(error)}"))
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
        """Number of a paused request that finds no room though nothing else uses any; None: there is none."""
        is_alone = not self.running and not self._worker.pool.stats.num_open  # texts to be scored hold rows too
        oldest = self._oldest_paused
        return oldest.request_id if is_alone and oldest is not None else None

    def only_reads(self, min_tokens: int) -> bool:
        """Return whether so many prompt tokens are left to read and no request is decoding."""
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
        """Return whether a running request has room for its next passes, moving it to more room if needed."""
        sequence, rows_for = one.sequence, one.rows_for
        num_tokens = len(sequence.token_ids)
        if self._worker.model.capacity(sequence.slot) >= (needed := rows_for(num_tokens)):
            return True
        return any(moves.grow(sequence, num_rows) for num_rows in (rows_for(num_tokens + GROWTH_TOKENS), needed))

    def _rows_at_first(self, one: LiveRequest) -> int:
        """Return the KV rows that a request gets at admission."""
        request, moves = one.request, self._worker.moves
        has_longest = request.is_bounded and not (self._lengths and moves is not None and moves.has_store)
        if moves is None or request.images is not None or has_longest:
            return one.num_rows
        expected = sum(self._lengths) // len(self._lengths) if self._lengths else _FIRST_LENGTH
        return one.rows_for(len(request.prompt_ids) + max(1, min(expected, request.params.max_tokens)))

    def _is_turn_of_paused(self, newcomer: LiveRequest) -> bool:
        """Return whether paused requests come before a waiting one.

        A request paused for an older one does. A request paused for a shorter one does if it arrived first.
        """
        return any(one.was_pushed_out or one.gave_way_before(newcomer.arrived_at) for one in self.paused.values())

    def _resume(self) -> LiveRequest | None:
        """Resume the oldest paused request. Returns: the request; None without one, or without room for it."""
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
        """Return whether a waiting request has room; a running one may be paused for it."""
        return self._fits(newcomer) or self._make_room(newcomer, now)

    def _fits(self, newcomer: LiveRequest, *, without: int | None = None) -> bool:
        """Return whether a waiting request has room beside the running ones; ``without``: the slot of one to leave."""
        request = newcomer.request
        num_rows, key = self._rows_at_first(newcomer), request.pool_key(request.prompt_ids)
        return self._worker.pool.has_room(num_rows, key, without=without)

    def _make_room(self, newcomer: LiveRequest, now: float) -> bool:
        """Pause the running request with the most tokens left, if the newcomer wants fewer. Returns: whether it did.

        A request is paused for shorter ones only once. Only requests that were waiting at that time go before it.
        """
        moves = self._worker.moves
        able = [one for one in self.running.values() if one.can_give_way]
        longest = max(able, key=lambda one: one.tokens_left, default=None)
        if moves is None or not moves.has_store or longest is None:
            return False
        if longest.tokens_left <= newcomer.request.params.max_tokens:
            return False
        if not self._fits(newcomer, without=longest.sequence.slot):
            return False
        longest.gave_way_at = now  # set even if the store has no room: only one attempt
        if not moves.pause(longest.sequence, may_drop=False):
            return False
        self.paused[longest.request_id] = self.running.pop(longest.request_id)
        return True


def _failure_of(request: Request, reason: str) -> Update:
    return Update(request.request_id, (), "error", request.new_stats(), TargetError(reason))
