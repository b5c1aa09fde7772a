"""Keeps requests in flight through a storm of faults, and watches what must not grow."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import psutil
import torch

from card.drafting.draft_tree import DraftTree
from card.engine.engine import Engine
from card.engine.request import Update
from card.errors import TargetError
from card.tree.candidates import CandidateCache
from tests.chaos.jobs import Jobs, Outcome
from tests.waiting import PATIENCE_S, until

CONCURRENCY = 16
MAX_NUM_SEQS = 12  # so that some of them wait
_MORE_BYTES = 96 << 20  # a few of the largest frames, in the memory of several threads


class World(Protocol):
    """An engine, its drafter, and what can befall them."""

    engine: Engine
    end_ids: frozenset[int]
    max_kv_bytes: int
    troubles: Counter[str]  # what has befallen them so far
    is_calm: bool  # no harm is done
    spare_trees: int  # that the drafter may still hold when no request is left
    spare_tensors: int

    @property
    def is_up(self) -> bool:
        """Whether the drafter can be spoken to."""

    def trouble(self, progress: float) -> None:
        """Do harm before a round, or not; ``progress`` is the share of requests that have ended."""

    def settle(self) -> None:
        """Let everything arrive that is on its way."""

    def close(self) -> None:
        """End everything."""


@dataclass(slots=True)
class Soak:
    """Runs jobs in a world, `CONCURRENCY` at a time, and collects what came of them."""

    world: World
    jobs: Jobs
    outcomes: list[Outcome] = field(default_factory=list)  # by request id
    _live: dict[int, Outcome] = field(default_factory=dict)

    def run(self, num_requests: int) -> list[Outcome]:
        """Run so many more; return their outcomes. Checks gauges after each round, and that nothing hangs."""
        engine, first = self.world.engine, len(self.outcomes)
        heard_at = time.monotonic()
        while len(self.outcomes) < first + num_requests or self._live:
            while len(self._live) < CONCURRENCY and len(self.outcomes) < first + num_requests:
                self._add()
            self._abort_some()
            self.world.trouble((len(self.outcomes) - first - len(self._live)) / num_requests)
            for update in engine.step():
                self._take(update)
                heard_at = time.monotonic()
            self._check_gauges()
            assert not self._live or time.monotonic() - heard_at < PATIENCE_S, "no request makes progress"
        return self.outcomes[first:]

    def recover(self, *, must_accept: bool = True) -> None:
        """Check that after the storm the drafter comes back and its candidates are of use again.

        Args:
            must_accept: False where the policy may find that speculation does not pay.
        """
        self.world.is_calm = True

        def is_back() -> bool:
            self.world.trouble(1.0)
            self.world.engine.step()  # without requests it only looks after the drafter
            return self.world.is_up

        until(is_back)
        until(lambda: any(outcome.accepted_tokens for outcome in self.run(CONCURRENCY)) or not must_accept)
        self.world.settle()

    def _add(self) -> None:
        request_id = len(self.outcomes)
        outcome = Outcome(self.jobs.draw())
        self.world.engine.add(self.world.engine.check(outcome.job.request(request_id, self.world.end_ids)))
        self.outcomes.append(outcome)
        self._live[request_id] = outcome

    def _abort_some(self) -> None:
        engine = self.world.engine
        for request_id, outcome in list(self._live.items()):
            if outcome.job.abort_after is not None and outcome.age >= outcome.job.abort_after:
                assert engine.abort(request_id)
                assert not engine.abort(request_id), "it is gone"
                outcome.reason = "abort"
                del self._live[request_id]
            outcome.age += 1

    def _take(self, update: Update) -> None:
        outcome = self._live[update.request_id]  # nothing may come of one that has ended
        assert update.token_ids or update.error
        outcome.token_ids += update.token_ids
        outcome.reason, outcome.error = update.finish_reason, update.error
        outcome.accepted_tokens = update.stats.accepted_tokens
        if update.finish_reason is not None:
            del self._live[update.request_id]
            assert (update.finish_reason == "error") == isinstance(update.error, TargetError)
            if update.error is None:
                self.jobs.remember(outcome)

    def _check_gauges(self) -> None:
        stats = self.world.engine.stats()
        assert stats.num_running + stats.num_waiting == len(self._live)
        assert stats.kv_open_sequences == stats.num_running <= MAX_NUM_SEQS
        assert stats.kv_used_bytes <= self.world.max_kv_bytes


def check_idle(engine: Engine) -> None:
    """Check that an engine without requests holds none, nor anything of one."""
    stats = engine.stats()
    assert not engine.has_work
    assert (stats.num_running, stats.num_waiting, stats.kv_open_sequences) == (0, 0, 0)
    assert stats.kv_used_bytes == stats.kv_retained_bytes
    engine.forget_prefixes()
    assert engine.stats().kv_used_bytes == 0


@dataclass(frozen=True, slots=True)
class Resources:
    """What this process holds."""

    rss_bytes: int
    num_threads: int  # Python's; those of ZeroMQ have files, and those of torch stay
    num_files: int
    num_trees: int
    num_tensors: int
    children: frozenset[int]

    @classmethod
    def now(cls) -> Resources:
        """Count after a collection of garbage."""
        gc.collect()
        process, kinds = psutil.Process(), Counter(map(type, gc.get_objects()))
        return cls(
            rss_bytes=process.memory_info().rss,
            num_threads=threading.active_count(),
            num_files=process.num_fds(),
            num_trees=kinds[CandidateCache] + kinds[DraftTree],
            num_tensors=kinds[torch.Tensor],
            children=frozenset(child.pid for child in process.children(recursive=True)),
        )


def check_flat(warm: Resources, after: Resources, *, spare_trees: int = 0, spare_tensors: int = 0) -> None:
    """Check that a storm has left the process as it was before, apart from what is kept up to a bound."""
    assert after.num_trees <= warm.num_trees + spare_trees
    assert after.num_tensors <= warm.num_tensors + spare_tensors
    assert after.num_threads <= warm.num_threads
    assert after.num_files <= warm.num_files + 4  # of ZeroMQ, which closes them a little later
    assert after.rss_bytes <= warm.rss_bytes + _MORE_BYTES


def check_nothing_is_left(before: Resources) -> None:
    """Check that everything that was opened since is closed again; ZeroMQ does so a little later."""

    def is_gone() -> bool:
        now = Resources.now()
        return (
            now.children <= before.children
            and now.num_trees <= before.num_trees
            and now.num_files <= before.num_files
            and now.num_threads <= before.num_threads
        )

    until(is_gone, complaint=lambda: f"{before} -> {Resources.now()}")
