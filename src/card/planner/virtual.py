"""Virtual time: a drafter with a time line of its own beside one target or several, and the links between them.

Whoever acts advances its own clock; messages carry the time at which they arrive. Nothing acts before everything that
could still reach it is known: a drafter is run up to the time of the target that looks, and of several targets the one
that is furthest behind goes on first. So the order of events does not depend on how they are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from card.assembly.drafters import make_worker
from card.errors import ProtocolError
from card.transport.link import DrafterLink, LinkStatus
from card.tree.messages import DrafterMessage, Ready, TargetMessage
from card.workers.drafter import MAX_TOKENS_PER_PASS, step_together
from card.writers.beam import BeamWriter

_LEAST_WAIT_S = 1e-3  # links to other processes wait whole milliseconds


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the beginning; they pass when someone says so."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(order=True, slots=True)
class _Arrival:
    at: float
    number: int  # in the order of sending
    target_idx: int = field(compare=False)
    message: TargetMessage = field(compare=False)


class VirtualDrafter:
    """A drafter that runs by itself: reads what has come, makes one pass for all who want one, sends the layers."""

    def __init__(
        self,
        writer: BeamWriter,
        clock: VirtualClock,
        *,
        num_targets: int = 1,
        delay_s: float,
    ) -> None:
        """Make a drafter that knows of no request.

        Args:
            clock: the drafter's own, which the passes of its model advance.
            delay_s: of a message on its way, each way.
        """
        self.workers = [make_worker(writer, clock=clock, peers=lambda: self.workers) for _ in range(num_targets)]
        self._clock = clock
        self._delay_s = delay_s
        self._inbox: list[_Arrival] = []
        self._outboxes: list[deque[tuple[float, DrafterMessage]]] = [deque() for _ in range(num_targets)]
        self._num_sent = 0
        self.num_passes = 0

    def send(self, target_idx: int, at: float, message: TargetMessage) -> None:
        """Put a target's message on its way."""
        self._num_sent += 1
        heappush(self._inbox, _Arrival(at + self._delay_s, self._num_sent, target_idx, message))

    def next_at(self) -> float | None:
        """Return when the next pass or message of the drafter is due; None if it waits for a message not sent yet."""
        if not all(worker.is_idle for worker in self.workers):
            return self._clock.now
        return max(self._clock.now, self._inbox[0].at) if self._inbox else None

    def act(self) -> None:
        """Do what is due next: take all messages that have arrived by then, and make a pass."""
        now = self.next_at()
        assert now is not None, "nothing is due"
        self._clock.now = now
        while self._inbox and self._inbox[0].at <= self._clock.now:
            arrival = heappop(self._inbox)
            self._answer(arrival.target_idx, self.workers[arrival.target_idx].receive(arrival.message))
        results = step_together(self.workers, max_tokens=MAX_TOKENS_PER_PASS)
        self.num_passes += any(results)
        for target_idx, result in enumerate(results):
            if isinstance(result, ProtocolError):
                raise result
            self._answer(target_idx, result)

    def first_arrival(self, target_idx: int) -> float | None:
        """Return when the next message for a target arrives, as far as it was sent."""
        outbox = self._outboxes[target_idx]
        return outbox[0][0] if outbox else None

    def take(self, target_idx: int, until: float) -> list[DrafterMessage]:
        """Return what has arrived at a target by then."""
        outbox = self._outboxes[target_idx]
        taken = []
        while outbox and outbox[0][0] <= until:
            taken.append(outbox.popleft()[1])
        return taken

    def _answer(self, target_idx: int, messages: Sequence[DrafterMessage]) -> None:
        self._outboxes[target_idx].extend((self._clock.now + self._delay_s, message) for message in messages)


class World:
    """One target and its drafter; the target's thread computes everything."""

    def __init__(self, drafter: VirtualDrafter, clocks: Sequence[VirtualClock]) -> None:
        self.drafter = drafter
        self.clocks = list(clocks)

    def reach(self, target_idx: int) -> None:
        """Let everything happen that comes before the target's present."""
        now = self.clocks[target_idx].now
        while (at := self.drafter.next_at()) is not None and at <= now:
            self.drafter.act()

    def wait(self, target_idx: int, deadline: float) -> None:
        """Let the target wait for a message, until the deadline at most."""
        clock = self.clocks[target_idx]
        while True:
            arrival = self.drafter.first_arrival(target_idx)
            if arrival is not None and arrival <= deadline:
                clock.now = max(clock.now, arrival)
                return
            at = self.drafter.next_at()
            if at is None or at > deadline:
                clock.now = deadline
                return
            self.drafter.act()


class VirtualLink(DrafterLink):
    """The way from one target to a drafter that runs by itself."""

    runs_by_itself = True

    def __init__(self, world: World, target_idx: int = 0, *, message_s: float = 0.0) -> None:
        """Make the link; each message takes ``message_s`` of the target's time."""
        self._world = world
        self._target_idx = target_idx
        self._message_s = message_s

    @property
    def _clock(self) -> VirtualClock:
        return self._world.clocks[self._target_idx]

    @property
    def status(self) -> LinkStatus:
        """Always up."""
        return LinkStatus("up")

    @property
    def ready(self) -> Ready | None:
        """Nothing: its latencies are known from profiles."""
        return None

    def begin(self) -> None:
        """Nothing to bring up."""

    def start(self) -> None:
        """Nothing to bring up."""

    def send(self, message: TargetMessage) -> None:
        """Put the message on its way."""
        self._clock.advance(self._message_s)
        self._world.drafter.send(self._target_idx, self._clock.now, message)

    def receive(self) -> list[DrafterMessage]:
        """Return what has arrived."""
        self._world.reach(self._target_idx)
        received = self._world.drafter.take(self._target_idx, self._clock.now)
        self._clock.advance(self._message_s * len(received))
        return received

    def wait(self, timeout_s: float) -> None:
        """Wait for the next message; whole milliseconds, as links to other processes do."""
        timeout_s = max(_LEAST_WAIT_S, round(timeout_s, 3))
        self._world.wait(self._target_idx, self._clock.now + timeout_s)

    def draft(self, num_passes: int) -> None:
        """Ignored: the drafter runs by itself."""

    def reject(self, reason: str) -> None:
        """Raise ProtocolError: a virtual drafter sends nothing impossible."""
        raise ProtocolError(reason)

    def close(self) -> None:
        """Nothing to end."""
