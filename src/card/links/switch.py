"""Two drafters of one model, one beside the target and one in turns with it; one of them is in use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from card.config import Schedule
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import (
    Close,
    Correction,
    Declined,
    DrafterMessage,
    Layer,
    Open,
    Ready,
    Resync,
    TargetMessage,
)
from card.links.link import DrafterLink, LinkStatus

_LOOK_AFTER_S = 0.1  # between checks of the resting drafter
_TERMS = 1 << 16  # request ids contain the number of their term, modulo this


class SwitchLink(DrafterLink):
    """Talks to the drafter of the present schedule; the other one has no requests and costs no time.

    Each switch begins a new term. The drafter's request ids contain the number of the term, so that late messages of an
    earlier term are recognised. After a switch a `Ready` is received, as from any new drafter: the target then opens
    every request there.
    """

    def __init__(self, beside: DrafterLink, turns: DrafterLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._links: dict[Schedule, DrafterLink] = {"beside": beside, "turns": turns}
        self._active = beside
        self.runs_by_itself, self.layers_per_pass = beside.runs_by_itself, turns.layers_per_pass
        self._term = 0
        self._open: set[int] = set()  # request ids of the target, opened in this term
        self._pending: list[DrafterMessage] = []
        self._clock = clock
        self._looked_at = clock()

    @property
    def available(self) -> frozenset[Schedule]:
        """The schedules with a living drafter, and ``off``."""
        alive = {schedule for schedule, link in self._links.items() if link.status.state in ("up", "degraded")}
        return frozenset({"off", *alive})

    @property
    def status(self) -> LinkStatus:
        """State of the present drafter; restarts of both."""
        status = self._active.status
        return LinkStatus(status.state, status.reason, sum(link.status.num_restarts for link in self._links.values()))

    @property
    def worst_status(self) -> LinkStatus:
        """The worse state of the two: a drafter that is down is reported even while the other one drafts."""
        status = self.status
        for link in self._links.values():
            link_status = link.status
            if link is not self._active and link_status.state != "up" and status.state == "up":
                return LinkStatus(link_status.state, link_status.reason, status.num_restarts)
        return status

    @property
    def ready(self) -> Ready | None:
        """The `Ready` message of the drafter beside the target; the other one is in this process."""
        return self._links["beside"].ready

    def use(self, schedule: Schedule) -> None:
        """Send messages to the drafter of this schedule from now on; ``off`` keeps the present one."""
        link = self._links.get(schedule, self._active)
        if link is self._active:
            return
        for request_id in self._open:
            self._active.send(Close(self._known_as(request_id)))
        self._open.clear()
        self._term = (self._term + 1) % _TERMS
        self._active, self.runs_by_itself = link, link.runs_by_itself
        self._pending = [Ready(0, 0, 0)]

    def begin(self) -> None:
        """Start both drafters without waiting for them."""
        for link in self._links.values():
            link.begin()

    def start(self) -> None:
        """Start both drafters. Raises: WorkerError if one fails or takes too long."""
        for link in self._links.values():
            link.start()

    def send(self, message: TargetMessage) -> None:
        """Send the message to the present drafter."""
        if isinstance(message, Open | Correction | Close):
            if isinstance(message, Open):
                self._open.add(message.request_id)
            elif isinstance(message, Close):
                self._open.discard(message.request_id)
            message = msgspec.structs.replace(message, request_id=self._known_as(message.request_id))
        self._active.send(message)

    def receive(self) -> list[DrafterMessage]:
        """Return the messages of the present drafter; only the state of the other one is checked."""
        received, self._pending = self._pending, []
        now = self._clock()
        is_due = now - self._looked_at >= _LOOK_AFTER_S
        self._looked_at = now if is_due else self._looked_at
        for link in self._links.values():
            if link is not self._active:
                if is_due:
                    link.receive()
                continue
            for message in link.receive():
                if isinstance(message, Layer | Resync | Declined):
                    request_id, term = divmod(message.request_id, _TERMS)
                    if term != self._term:
                        continue
                    message = msgspec.structs.replace(message, request_id=request_id)  # noqa: PLW2901
                received.append(message)
        return received

    def wait(self, timeout_s: float) -> None:
        """Wait for the present drafter."""
        self._active.wait(timeout_s)

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        """Let the present drafter draft, if it takes turns."""
        known_as = frozenset(self._known_as(request_id) for request_id in end.resting)
        return self._active.draft(num_passes, replace(end, resting=known_as))

    def reject(self, reason: str) -> None:
        """Replace the present drafter, as it sent an invalid message."""
        self._active.reject(reason)

    def close(self) -> None:
        """End both drafters. May be called twice."""
        for link in self._links.values():
            link.close()

    def _known_as(self, request_id: int) -> int:
        return request_id * _TERMS + self._term
