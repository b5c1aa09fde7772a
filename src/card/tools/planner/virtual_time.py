"""Virtual time: a drafter with a clock of its own beside a target, and the link between them.

Each worker advances its own clock; messages carry the time at which they arrive. A worker acts only when all earlier
messages to it are known: the drafter is run up to the target's present time whenever the target reads the link. So the
order of events does not depend on the order of computation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from card.assembly.drafters import make_worker
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.drafting.messages import DrafterMessage, TargetMessage, TargetStates
from card.drafting.protocol import DraftWriter
from card.errors import ProtocolError
from card.links.link import DrafterLink
from card.tree.nodes import Nodes

_LEAST_WAIT_S = 1e-3  # links to other processes wait whole milliseconds


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the beginning, advanced by hand."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class VirtualWriter(LocalWriter):
    """A local writer whose proposals take time."""

    def __init__(self, writer: LocalWriter, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        """Ask this writer.

        Args:
            seconds: the time of a proposal, by its number of candidates.
        """
        self.top_k = writer.top_k  # type: ignore[misc]
        self._writer, self._clock, self._seconds = writer, clock, seconds

    def open(self, prompt_ids: Sequence[int]) -> WriterSequence:
        """Begin a request."""
        return _VirtualProposals(self._writer.open(prompt_ids), self._clock, self._seconds)

    def close(self) -> None:
        """End the writer."""
        self._writer.close()


@dataclass(slots=True)
class _VirtualProposals(WriterSequence):
    writer: WriterSequence
    clock: VirtualClock
    seconds: Callable[[int], float]

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        proposal = self.writer.propose(best_path, budget)
        self.clock.advance(self.seconds(len(proposal)))
        return proposal

    def observe(self, seen: Observation) -> None:
        self.writer.observe(seen)

    def close(self) -> None:
        self.writer.close()


class VirtualDrafter:
    """A drafter outside the target's thread: reads its messages, makes one pass, sends the layer."""

    def __init__(self, writer: DraftWriter, clock: VirtualClock, *, delay_s: float) -> None:
        """Make a drafter without requests.

        Args:
            clock: the drafter's own, which the passes of its model advance.
            delay_s: of a message, each way.
        """
        self.worker = make_worker(writer, clock=clock)
        self._clock = clock
        self._delay_s = delay_s
        self._inbox: deque[tuple[float, TargetMessage | TargetStates]] = deque()  # with the time of arrival
        self._outbox: deque[tuple[float, DrafterMessage]] = deque()

    def send(self, at: float, message: TargetMessage | TargetStates) -> None:
        """Put the target's message on its way; they are sent in the order of their times."""
        self._inbox.append((at + self._delay_s, message))

    def run_until(self, now: float) -> list[DrafterMessage]:
        """Run up to the target's present time; return the messages that have arrived by then."""
        while self._next_at() <= now:
            self._act()
        taken = []
        while self._outbox and self._outbox[0][0] <= now:
            taken.append(self._outbox.popleft()[1])
        return taken

    def wait(self, now: float, deadline: float) -> float:
        """Return when the next message arrives at the waiting target, the deadline at the latest."""
        while not (self._outbox and self._outbox[0][0] <= deadline) and self._next_at() <= deadline:
            self._act()
        return max(now, min(self._outbox[0][0], deadline)) if self._outbox else deadline

    def _next_at(self) -> float:
        """Return when the drafter's next pass or message is due; infinity if it waits for a message not yet sent."""
        if not self.worker.is_idle:
            return self._clock.now
        return max(self._clock.now, self._inbox[0][0]) if self._inbox else math.inf

    def _act(self) -> None:
        """Process all messages that are due next, and make a pass."""
        self._clock.now = self._next_at()
        while self._inbox and self._inbox[0][0] <= self._clock.now:
            self._answer(self.worker.receive(self._inbox.popleft()[1]))
        self._answer(self.worker.step())

    def _answer(self, messages: Iterable[DrafterMessage]) -> None:
        self._outbox.extend((self._clock.now + self._delay_s, message) for message in messages)


class VirtualLink(DrafterLink):
    """The link from a target to a virtual drafter; it is always up."""

    def __init__(self, drafter: VirtualDrafter, clock: VirtualClock, *, message_s: float = 0.0) -> None:
        """Make the link of the target with this clock; each message takes ``message_s`` of its time."""
        super().__init__()
        self._drafter = drafter
        self._clock = clock
        self._message_s = message_s

    def send(self, message: TargetMessage) -> None:
        """Put the message on its way."""
        self._clock.advance(self._message_s)
        self._drafter.send(self._clock.now, message)

    def show(self, states: TargetStates) -> None:
        """Hand over states, which takes no time."""
        self._drafter.send(self._clock.now, states)

    def receive(self) -> list[DrafterMessage]:
        """Return the messages that have arrived."""
        received = self._drafter.run_until(self._clock.now)
        self._clock.advance(self._message_s * len(received))
        return received

    def wait(self, timeout_s: float) -> None:
        """Wait for the next message; whole milliseconds, as links to other processes do."""
        timeout_s = max(_LEAST_WAIT_S, round(timeout_s, 3))
        self._clock.now = self._drafter.wait(self._clock.now, self._clock.now + timeout_s)

    def reject(self, reason: str) -> None:
        """Raise ProtocolError: a virtual drafter sends nothing impossible."""
        raise ProtocolError(reason)
