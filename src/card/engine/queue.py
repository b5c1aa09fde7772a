"""Requests of an engine: who waits, who runs, and who is paused so that others have room."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from card.engine.running import RunningRequest, WaitingRequest
from card.errors import CapacityError, TargetError
from card.workers.request import CheckedRequest, Request, Update
from card.workers.sequence import Work
from card.workers.target import TargetWorker

_IDLE_PREFILL_CHUNK = 512  # prompt tokens in one pass while no request is waiting for its next token


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
        self._waiting: deque[WaitingRequest] = deque()
        self._paused: dict[int, RunningRequest] = {}  # whose rows are in the worker's store, the longest first
        self.running: dict[int, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self.running) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Number of requests that do not run yet, or not now."""
        return len(self._waiting) + len(self._paused)

    def add(self, checked: CheckedRequest, now: float) -> None:
        """Let a request wait for its turn."""
        self._waiting.append(WaitingRequest(checked, now))

    def withdraw(self, request_id: int) -> Request | None:
        """Forget a request that was not taken up yet. Returns: what it was; None for any other one."""
        for entry in self._waiting:
            if entry.checked.request.request_id == request_id:
                self._waiting.remove(entry)
                return entry.checked.request
        return None

    def find(self, request_id: int) -> RunningRequest | None:
        """Return a request that was taken up, be it paused; None for any other one."""
        return self.running.get(request_id) or self._paused.get(request_id)

    def leave(self, request_id: int) -> RunningRequest:
        """Let go of a request that was taken up."""
        return self.running.pop(request_id, None) or self._paused.pop(request_id)

    def admit(self, now: float, num_restarts: int) -> tuple[list[RunningRequest], list[Update]]:
        """Take up waiting requests while there is room and prompts do not pile up; let paused ones go on.

        A request stays outside until its prompt's turn comes, so that it can reuse what others read meanwhile.

        Args:
            now: seconds of the engine's clock.
            num_restarts: of the drafter until now.
        Returns: those taken up, and the failure of those that the device has no memory for though nothing else runs.
        """
        taken_up, refused = list[RunningRequest](), list[Update]()
        backlog = sum(self._prompts_left())
        while len(self.running) < self._limits.max_num_seqs and backlog < self._limits.prefill_chunk:
            entry = self._waiting[0] if self._waiting else None
            if entry is None or self._is_turn_of_paused(entry) or not self._has_room(entry, now):
                if not self._resume():
                    break
                continue
            request = entry.checked.request
            try:
                sequence = self._worker.add(entry.checked)
            except CapacityError as error:
                if self.running:
                    break  # some of them will leave
                failure = TargetError(f"the request cannot be taken up: {error}")
                refused.append(Update(request.request_id, (), "error", request.new_stats(), failure))
            else:
                one = self.running[request.request_id] = RunningRequest(sequence, entry.arrived_at, now, num_restarts)
                taken_up.append(one)
                backlog += sequence.prompt_tokens_left
            self._waiting.popleft()
        return taken_up, refused

    @property
    def stranded_id(self) -> int | None:
        """Number of a paused request that finds no room though nothing else has any; None: there is none."""
        is_alone = not self.running and not self._worker.pool.stats.num_open  # texts to be scored have rows, too
        return next(iter(self._paused), None) if is_alone else None

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
            if num_left and chunk:
                work.append(Work(one.sequence, num_prompt_tokens=min(num_left, chunk)))
                chunk -= min(num_left, chunk)
        return work

    def _prompts_left(self) -> list[int]:
        return [one.sequence.prompt_tokens_left for one in self.running.values()]

    def _is_turn_of_paused(self, entry: WaitingRequest) -> bool:
        """Return whether a paused request comes before a waiting one: if it was paused before that one arrived."""
        oldest = next(iter(self._paused.values()), None)
        return oldest is not None and oldest.paused_at is not None and oldest.paused_at < entry.arrived_at

    def _resume(self) -> bool:
        """Let the request go on that was paused first. Returns: whether there is one, and room for it."""
        request_id, one = next(iter(self._paused.items()), (None, None))
        if one is None or request_id is None or self._worker.paused is None:
            return False
        if not self._worker.paused.resume(one.sequence):
            return False
        self.running[request_id] = self._paused.pop(request_id)
        return True

    def _has_room(self, entry: WaitingRequest, now: float) -> bool:
        """Return whether there is room for a waiting request, perhaps that of a running one, which is paused."""
        return self._worker.pool.has_room(entry.checked.num_rows) or self._make_room(entry, now)

    def _make_room(self, entry: WaitingRequest, now: float) -> bool:
        """Pause the running request with the most tokens to go, if a waiting one wants fewer. Returns: whether it was.

        Nobody is paused twice, and only those that waited then overtake him. So every text comes to its end.
        """
        if self._worker.paused is None:
            return False
        able = [one for one in self.running.values() if one.can_pause]
        longest = max(able, key=lambda one: one.tokens_left, default=None)
        if longest is None or longest.tokens_left <= entry.checked.request.params.max_tokens:
            return False
        pool, sequence = self._worker.pool, longest.sequence
        if not pool.has_room(entry.checked.num_rows, without=sequence.slot):
            return False
        longest.paused_at = now  # whether there is room in the store or not: it is tried once
        if not self._worker.paused.pause(sequence):
            return False
        self._paused[sequence.request.request_id] = self.running.pop(sequence.request.request_id)
        return True
