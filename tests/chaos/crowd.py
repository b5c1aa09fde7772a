"""A crowd of asyncio readers of one `AsyncLLM`, many of whom go before their answer is complete."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from card.api.async_llm import AsyncLLM, RequestStream
from tests.chaos.jobs import Jobs, Outcome
from tests.chaos.soak import CONCURRENCY, PATIENCE_S

MANNERS = ("abort", "leave", "cancel", "let go")  # of those who go early


@dataclass(slots=True)
class Crowd:
    """Sends jobs to ``llm``, `CONCURRENCY` at a time."""

    llm: AsyncLLM
    jobs: Jobs
    pause_s: Callable[[], float] = lambda: 0.0  # of a reader between two requests
    outcomes: list[Outcome] = field(default_factory=list)
    manners: list[str] = field(default_factory=list)  # in which readers left: each in its turn
    _num_left: int = 0

    async def run(self, num_requests: int, harm: Callable[[], Awaitable[None]] | None = None) -> None:
        """Run so many more, while ``harm`` is done again and again."""
        self._num_left = num_requests
        async with asyncio.TaskGroup() as readers:
            villain = readers.create_task(self._do_harm(harm)) if harm else None
            crowd = [readers.create_task(self._read_some()) for _ in range(CONCURRENCY)]
            await asyncio.wait(crowd)
            self._num_left = 0
            if villain:
                await villain

    async def is_idle(self) -> None:
        """Wait until the engine holds no request; what was dropped is dropped within a round."""
        async with asyncio.timeout(PATIENCE_S):
            while (stats := self.llm.stats()).num_running or stats.num_waiting or stats.kv_open_sequences:
                await asyncio.sleep(0.01)

    async def _read_some(self) -> None:
        while self._num_left:
            self._num_left -= 1
            outcome = Outcome(self.jobs.draw())
            self.outcomes.append(outcome)
            async with asyncio.timeout(PATIENCE_S):
                await self._read(outcome)
            await asyncio.sleep(self.pause_s())

    async def _do_harm(self, harm: Callable[[], Awaitable[None]]) -> None:
        while self._num_left:
            await harm()

    async def _read(self, outcome: Outcome) -> None:
        job = outcome.job
        stream = self.llm.generate(list(job.prompt_ids), job.params)
        if job.abort_after is None:
            await _listen(stream, outcome)
            self.jobs.remember(outcome)
            return
        manner = MANNERS[len(self.manners) % len(MANNERS)]
        self.manners.append(manner)
        if manner == "cancel":
            reader = asyncio.ensure_future(_listen(stream, outcome))
            await asyncio.sleep(0.002 * job.abort_after)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        else:
            await _listen(stream, outcome, most_chunks=job.abort_after // 2)
            if manner == "abort":
                was_running = await self.llm.abort(stream.request_id)
                await _listen(stream, outcome)
                assert was_running == (outcome.reason == "abort")
            elif manner == "leave":
                await stream.aclose()
        outcome.reason = outcome.reason or "abort"


async def _listen(stream: RequestStream, outcome: Outcome, most_chunks: int | None = None) -> None:
    while outcome.reason is None and most_chunks != 0:
        chunk = await anext(stream)
        outcome.token_ids += chunk.token_ids
        outcome.reason, outcome.accepted_tokens = chunk.finish_reason, chunk.stats.accepted_tokens
        most_chunks = None if most_chunks is None else most_chunks - 1
