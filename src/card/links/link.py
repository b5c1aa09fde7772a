"""Links from the target to its drafter, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass

from card.config import DrafterState, Schedule
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import DrafterMessage, Ready, TargetMessage, TargetStates


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """State of a drafter."""

    state: DrafterState
    reason: str = ""
    num_restarts: int = 0

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


class DrafterLink:
    """A drafter as an engine sees it, local or remote.

    Only `wait`, `start`, `close`, and `draft` of a drafter in turns block, each for a bounded time. Messages may be
    lost. A received `Ready` announces a new drafter, which knows no requests. The methods of this class suit a drafter
    in this process.
    """

    runs_by_itself: bool = True
    """False if it drafts only inside `draft`."""
    layers_per_pass: int = 1
    """Most layers of candidates that a pass inside `draft` makes."""

    def __init__(self) -> None:
        self._status = LinkStatus("up")

    def begin(self) -> None:
        """Start the drafter without waiting for it; a failed start is tried again."""

    def start(self) -> None:
        """Start the drafter, or continue after `begin`, and wait for it.

        Raises: WorkerError if it fails or takes too long.
        """
        self.begin()

    def send(self, message: TargetMessage) -> None:
        """Send a message, or drop it if the drafter cannot take it now."""
        raise NotImplementedError

    def show(self, states: TargetStates) -> None:
        """Show a drafter in this process the target's hidden states; other drafters get none."""

    def receive(self) -> list[DrafterMessage]:
        """Return the messages that have arrived."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Return when something has arrived, or after ``timeout_s`` seconds."""

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        """Let a drafter in turns with the target draft; a free-running drafter ignores the call.

        Args:
            num_passes: most passes.
            end: rule by which the turn ends earlier for a request.
        Returns: the requests that each pass made candidates for, and its seconds.
        """
        return []

    def reject(self, reason: str) -> None:
        """Replace the drafter, or end it for good, as it sent an invalid message."""
        self._status = LinkStatus("down", reason)

    @property
    def ready(self) -> Ready | None:
        """The `Ready` message of the newest drafter outside this process; None before the first."""
        return None

    @property
    def status(self) -> LinkStatus:
        """State of the drafter."""
        return self._status

    @property
    def worst_status(self) -> LinkStatus:
        """The worst state among several drafters, which users see."""
        return self.status

    @property
    def own_schedule(self) -> Schedule:
        """The drafter's schedule: ``turns`` if it drafts only in `draft`."""
        return "beside" if self.runs_by_itself else "turns"

    @property
    def available(self) -> frozenset[Schedule]:
        """The schedules that are possible now; ``off`` always is."""
        is_there = self.status.state in ("up", "degraded")
        return frozenset({"off", self.own_schedule}) if is_there else frozenset({"off"})

    def use(self, schedule: Schedule) -> None:
        """Send messages to the drafter of this schedule from now on, if there are several."""

    def close(self) -> None:
        """End the drafter. May be called twice."""


class NoDrafter(DrafterLink):
    """The link of a target without a drafter: it drops all messages and receives none."""

    def __init__(self) -> None:
        self._status = LinkStatus("none")

    @property
    def own_schedule(self) -> Schedule:
        """The schedule without a drafter."""
        return "off"

    def send(self, message: TargetMessage) -> None:
        """Drop a message."""

    def receive(self) -> list[DrafterMessage]:
        """Return nothing."""
        return []
