"""An engine that is not ours, in a hundred lines: rows that move, leave and come back, around plain decoding.

It does what vLLM does to a proposer: requests have no names, rows are condensed, swapped, preempted and resumed,
prompts are read in parts, prefixes are shared, and a chain may be verified in part. Beyond a row's length lies junk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Next = Callable[[Sequence[int]], int]
"""The token that follows a text."""


class Proposer(Protocol):
    """What the engine asks for candidates."""

    def propose(
        self, new_ids: Sequence[Sequence[int]], lengths: Sequence[int], tokens: NDArray[np.int32]
    ) -> list[list[int]]:
        """Return a chain for each row."""


@dataclass(slots=True)
class Job:
    """One request of the engine."""

    token_ids: list[int]
    num_new: int  # tokens that it still wants
    prompt_len: int
    unread: int = 1  # steps until its text has been read
    chain: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turmoil:
    """How often what happens to a row, as chances per step."""

    preempt: float = 0.0
    resume: float = 0.5
    swap: float = 0.0
    trim: float = 0.0  # verify only a part of a chain
    chunk: float = 0.0  # read a text in one step more
    cancel: float = 0.0


class FakeEngine:
    """Decodes greedily, with a batch of ``num_rows`` and whatever candidates it is given."""

    def __init__(
        self, follow: Next, proposer: Proposer, *, num_rows: int, max_len: int, seed: int, turmoil: Turmoil
    ) -> None:
        self._follow, self._proposer, self._turmoil = follow, proposer, turmoil
        self._rng = random.Random(seed)
        self._rows: list[Job] = []
        self._waiting: list[Job] = []
        self._preempted: list[Job] = []
        self._num_rows, self._max_len = num_rows, max_len
        self.done: list[Job] = []
        self.cancelled: list[Job] = []
        self.num_steps = self.num_proposed = self.num_accepted = self.num_preempted = 0

    def add(self, prompt_ids: Sequence[int], num_new: int) -> Job:
        """Queue a request."""
        job = Job(list(prompt_ids), min(num_new, self._max_len - len(prompt_ids)), len(prompt_ids))
        self._waiting.append(job)
        return job

    def run(self) -> None:
        """Step until every request is done."""
        while self._rows or self._waiting or self._preempted:
            self.step()

    def step(self) -> None:
        """Run one step of all rows."""
        self._schedule()
        new_ids = [self._advance(job) for job in self._rows]
        tokens = np.full((self._num_rows, self._max_len), 10**6, np.int32)
        for row, job in enumerate(self._rows):
            tokens[row, : len(job.token_ids)] = job.token_ids
        lengths = [len(job.token_ids) for job in self._rows]
        chains = self._proposer.propose(new_ids, lengths, tokens)
        assert len(chains) == len(self._rows)
        for job, chain in zip(self._rows, chains, strict=True):
            assert all(type(token) is int for token in chain)
            job.chain = chain
            self.num_proposed += len(chain)
        self.num_steps += 1
        self.done += [job for job in self._rows if not job.num_new]
        self._rows = [job for job in self._rows if job.num_new]

    def _happens(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _schedule(self) -> None:
        rng, turmoil = self._rng, self._turmoil
        if self._rows and self._happens(turmoil.preempt):
            job = self._rows.pop(rng.randrange(len(self._rows)))
            job.chain = []
            self._preempted.append(job)
            self.num_preempted += 1
        if self._rows and self._happens(turmoil.cancel):
            self.cancelled.append(self._rows.pop())
        if len(self._rows) > 1 and self._happens(turmoil.swap):
            one, other = rng.sample(range(len(self._rows)), 2)
            self._rows[one], self._rows[other] = self._rows[other], self._rows[one]
        while len(self._rows) < self._num_rows:
            if self._preempted and (not self._rows or self._happens(turmoil.resume)):
                job = self._preempted.pop(0)
            elif self._waiting:
                job = self._waiting.pop(0)
            else:
                break
            job.unread = 1 + (self._happens(turmoil.chunk) and rng.randint(1, 3))
            self._rows.append(job)

    def _advance(self, job: Job) -> list[int]:
        """Return what a row commits in this step."""
        if job.unread > 1:
            job.unread -= 1
            return []
        chain = job.chain
        if chain and self._happens(self._turmoil.trim):
            chain = chain[: self._rng.randint(0, len(chain))]
        new_ids: list[int] = []
        for token in chain:
            if self._follow([*job.token_ids, *new_ids]) != token:
                break
            new_ids.append(token)
        self.num_accepted += len(new_ids)
        new_ids.append(self._follow([*job.token_ids, *new_ids]))
        new_ids = new_ids[: job.num_new]
        job.token_ids += new_ids
        job.num_new -= len(new_ids)
        return new_ids
