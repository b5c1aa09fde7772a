"""What every link to a drafter outside this process needs to know: is it alive, and when to try the next one."""

from __future__ import annotations

from typing import Literal

from card.transport.link import LinkStatus
from card.workers.metrics import DrafterState

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
PING_AFTER_S = 10.0  # of silence at the latest: a server forgets clients that say nothing for longer
STABLE_AFTER_S = 60.0  # a drafter that lived so long starts again without a longer back-off

Advice = Literal["nothing", "start", "ping", "give up"]


class Watch:
    """Follows one drafter after the other, each under an incarnation of its own. No I/O, and the clock is the caller's.

    A drafter that is quiet for half the silence timeout is pinged. If it does not answer, it counts as degraded after
    half the timeout, and is given up after the whole. The pause before the next one doubles each time.
    """

    def __init__(self, *, start_timeout_s: float, silence_timeout_s: float) -> None:
        self.incarnation = 0
        self.state: DrafterState = "down"
        self.reason = "not started"
        self._start_timeout_s = start_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._backoff_s = FIRST_BACKOFF_S
        self.begun_at = self._heard_at = 0.0
        self._pinged_at: float | None = None
        self._next_at: float | None = None

    @property
    def status(self) -> LinkStatus:
        """State of the present drafter, why it is not up, and how many were replaced."""
        return LinkStatus(self.state, self.reason, max(self.incarnation - 1, 0))

    @property
    def is_listening(self) -> bool:
        """Whether it makes sense to send something."""
        return self.state in ("up", "degraded")

    def begin(self, now: float) -> None:
        """Start the next incarnation."""
        self.incarnation += 1
        self.state, self.reason = "starting", ""
        self.begun_at = self._heard_at = now
        self._next_at = self._pinged_at = None

    def hear(self, now: float) -> None:
        """Note a sign of life."""
        self._heard_at, self._pinged_at = now, None
        self.state, self.reason = "up", ""

    def fail(self, now: float, reason: str, most_backoff_s: float = MAX_BACKOFF_S) -> None:
        """Note that this drafter is lost; the next one is due after the back-off."""
        if now - self.begun_at > STABLE_AFTER_S:
            self._backoff_s = FIRST_BACKOFF_S
        self.state, self.reason = "down", reason
        self._next_at = now + min(self._backoff_s, most_backoff_s)
        self._backoff_s = min(2 * self._backoff_s, most_backoff_s)

    def forgive(self) -> None:
        """Let the next drafter start at once: nothing was wrong with the last one."""
        self._next_at, self._backoff_s = 0.0, FIRST_BACKOFF_S

    def end(self, reason: str = "closed") -> None:
        """Note that no drafter is wanted: for good, or until `forgive`."""
        self.state, self.reason = "down", reason
        self._next_at = None

    def advise(self, now: float) -> Advice:
        """Return what is to be done now; after "give up" `complaint` says why."""
        if self._next_at is not None:
            return "start" if now >= self._next_at else "nothing"
        if self.state == "starting":
            return "give up" if now - self.begun_at > self._start_timeout_s else "nothing"
        if not self.is_listening:
            return "nothing"
        if self._pinged_at is None:
            if now - self._heard_at <= min(self._silence_timeout_s / 2, PING_AFTER_S):
                return "nothing"
            self._pinged_at = now
            return "ping"
        if now - self._pinged_at > self._silence_timeout_s:
            return "give up"
        if now - self._pinged_at > self._silence_timeout_s / 2:
            self.state, self.reason = "degraded", self.complaint(now)
        return "nothing"

    def complaint(self, now: float) -> str:
        """Return what is wrong with a drafter that does not speak."""
        if self.state == "starting":
            return f"not ready after {self._start_timeout_s:g} s"
        return f"silent for {now - self._heard_at:.1f} s"
