"""A deterministic drafter link for tests: one thread, seeded, and as unreliable as asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from card.drafting.drafter import DrafterWorker
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import DrafterMessage, Ready, TargetMessage, decode, encode
from card.links.link import DrafterLink, LinkStatus

M = TypeVar("M", TargetMessage, DrafterMessage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How unreliable the link is. Shares are probabilities per message (or per round for ``kill``)."""

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    max_delay: int = 0  # rounds; a delay that varies also changes the order
    kill: float = 0.0
    max_passes: int = 4  # drafter passes per round: drawn from 0 to this


class _Channel(Generic[M]):
    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self._faults, self._rng = faults, rng
        self._queue: list[tuple[int, bytes]] = []

    def put(self, message: M, now: int) -> None:
        if self._rng.random() < self._faults.drop:
            return
        for _ in range(1 + (self._rng.random() < self._faults.duplicate)):
            self._queue.append((now + self._rng.randint(0, self._faults.max_delay), encode(message, 0)))

    def take(self, now: int) -> list[M]:
        due = [frame for at, frame in self._queue if at <= now]
        self._queue = [(at, frame) for at, frame in self._queue if at > now]
        return [decode(frame)[1] for frame in due]  # type: ignore[misc]


class FakeLink(DrafterLink):
    """Makes a random number of drafter passes per round and loses, repeats, delays and reorders messages."""

    runs_by_itself = False
    layers_per_pass = 1

    def __init__(self, make_worker: Callable[[], DrafterWorker], faults: Faults) -> None:
        self._make_worker = make_worker
        self.worker = make_worker()
        self._faults = faults
        self._rng = random.Random(faults.seed)
        self._to_drafter: _Channel[TargetMessage] = _Channel(faults, self._rng)
        self._to_target: _Channel[DrafterMessage] = _Channel(faults, self._rng)
        self._urgent: list[DrafterMessage] = []
        self._now = 0
        self._num_restarts = 0
        self._rejected = ""

    def begin(self) -> None:
        """Nothing to bring up."""

    def start(self) -> None:
        """Nothing to bring up."""

    def send(self, message: TargetMessage) -> None:
        """Put the message on its unreliable way."""
        self._to_drafter.put(message, self._now)

    def receive(self) -> list[DrafterMessage]:
        """Return what has survived the way back."""
        urgent, self._urgent = self._urgent, []
        return urgent + self._to_target.take(self._now)

    def wait(self, timeout_s: float) -> None:
        """Return at once."""

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        """Let one round go by: messages move, the drafter makes a few passes or is killed. The number is ignored."""
        self._now += 1
        if self._rng.random() < self._faults.kill:
            self.worker = self._make_worker()
            self._num_restarts += 1
            self._urgent.append(Ready(0, 0, 0))
            return []
        for message in self._to_drafter.take(self._now):
            self._answer(self.worker.receive(message))
        self.worker.begin_turn(end)
        most = self._rng.randint(0, self._faults.max_passes)
        for _ in range(most):
            self._answer(self.worker.step())
        return [(1, 0.0)] * most

    def reject(self, reason: str) -> None:
        """Remember the reason; a test looks at the status."""
        self._rejected = reason

    @property
    def ready(self) -> Ready | None:
        """Nothing: the drafter is in this process."""
        return None

    @property
    def status(self) -> LinkStatus:
        """Up, or down with the reason of the last rejection."""
        return LinkStatus("down" if self._rejected else "up", self._rejected, self._num_restarts)

    def close(self) -> None:
        """Nothing to end."""

    def _answer(self, messages: list[DrafterMessage]) -> None:
        for message in messages:
            self._to_target.put(message, self._now)
