"""A closed loop on one engine: as many requests in flight as asked for, the next one as soon as one has ended."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from card.api.host import Host, PreparedRequest
from card.config import SamplingParams
from card.engine.engine import Update
from card.engine.metrics import RequestStats


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request. Times are seconds from when it was submitted."""

    token_ids: tuple[int, ...]
    first_token_s: float
    latency_s: float
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Load:
    """All requests of one loop."""

    served: tuple[Served, ...]  # in the order of the prompts
    wall_s: float  # from the first submission to the end of the last request
    cpu_s: float  # processor time of this process, all its threads; a drafter's own process is not in it
    full_tokens: int  # new tokens while as many requests were in flight as asked for: before the queue ran dry
    full_s: float
    schedules: Counter[str]  # rounds that gave tokens, by schedule: beside, turns or off
    reason: str  # for the last of them

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(len(one.token_ids) for one in self.served)


@dataclass(slots=True)
class _InFlight:
    """A request that runs, and what has come of it."""

    prompt_idx: int
    prepared: PreparedRequest
    submitted_at: float
    first_token_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)

    def take(self, update: Update, now: float) -> Served | None:
        """Note an update and turn it into text, as a server does; return the result if it was the last one."""
        if update.error is not None:
            raise update.error
        is_end = update.finish_reason is not None
        self.prepared.text.take(update.token_ids, is_end=is_end)
        if update.token_ids and not self.token_ids:
            self.first_token_at = now
        self.token_ids += update.token_ids
        if not is_end:
            return None
        first_token_s, latency_s = self.first_token_at - self.submitted_at, now - self.submitted_at
        return Served(tuple(self.token_ids), first_token_s, latency_s, update.stats)


class ClosedLoop:
    """Steps the engine of a `Host` in the caller's thread."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._request_ids = itertools.count()

    def run(self, prompts: Sequence[Sequence[int]], concurrency: int, params: SamplingParams) -> Load:
        """Answer all prompts, ``concurrency`` at a time. Raises: the error of a request that fails."""
        waiting = deque(enumerate(prompts))
        in_flight: dict[int, _InFlight] = {}
        served: dict[int, Served] = {}
        schedules: Counter[str] = Counter()
        reason, full_tokens, full_s = "", 0, 0.0
        cpu_before, started = time.process_time(), time.perf_counter()
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < concurrency:
                    self._submit(*waiting.popleft(), params, in_flight)
                is_full = len(in_flight) == concurrency
                updates = self.host.engine.step()
                now = time.perf_counter()
                if is_full:
                    full_tokens, full_s = full_tokens + sum(len(u.token_ids) for u in updates), now - started
                for update in updates:
                    one = in_flight[update.request_id]
                    result = one.take(update, now)
                    if result is not None:
                        served[one.prompt_idx] = result
                        del in_flight[update.request_id]
                if updates:
                    last = updates[-1].stats
                    schedules[last.schedule], reason = schedules[last.schedule] + 1, last.schedule_reason
        finally:
            for request_id in in_flight:  # after an error or Ctrl-C: the engine may be used again
                self.host.engine.abort(request_id)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        in_order = tuple(served[i] for i in range(len(prompts)))
        return Load(in_order, wall_s, cpu_s, full_tokens, full_s, schedules, reason)

    def _submit(
        self, prompt_idx: int, prompt_ids: Sequence[int], params: SamplingParams, in_flight: dict[int, _InFlight]
    ) -> None:
        request_id, now = next(self._request_ids), time.perf_counter()
        prepared = self.host.make_request(prompt_ids, params, request_id)
        self.host.engine.add(prepared.checked)
        in_flight[request_id] = _InFlight(prompt_idx, prepared, now)
