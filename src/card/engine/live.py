"""A request on its way through an engine: one object from the check to the last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from card.engine.policy.rounds import Policy
from card.engine.request import Request
from card.engine.sequence import Sequence
from card.links.link import LinkStatus


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that a target can run, as its worker has found, and what the engine sees of it.

    It is checked, then it waits, then it runs, perhaps paused in between: the queue knows which. Times are of the
    engine's clock.
    """

    request: Request  # as it was asked for
    num_rows: int  # KV rows that it may come to need: its longest text and the largest tree
    num_spare_rows: int  # rows beyond its text that any of its passes may write
    arrived_at: float = 0.0  # when it began to wait
    sequence: Sequence = field(init=False)  # from when it was taken up, as all that follows
    started_at: float = 0.0
    restarts_before: int = 0  # of the drafter
    age: int = 0  # number by the order in which requests were taken up
    passes_seen: int = 0  # of the drafter, for this request
    busy_seen_s: float = 0.0
    gave_way_at: float | None = None  # when it was to give its room to a shorter one; None: never
    was_pushed_out: bool = False  # an older one has taken its room, and it is not back yet
    unheard_at: int = -1  # drafter passes when waiting for it ran out; it is not waited for until there are more

    def take_up(self, sequence: Sequence, now: float, *, num_restarts: int, age: int) -> None:
        """Begin to run."""
        self.sequence, self.started_at, self.restarts_before, self.age = sequence, now, num_restarts, age

    def rows_for(self, num_tokens: int) -> int:
        """Return the KV rows that it needs while its text is no longer than so many tokens."""
        return min(self.num_rows, num_tokens + self.num_spare_rows)

    @property
    def tokens_left(self) -> int:
        """The most tokens that its text may still get."""
        sequence = self.sequence
        return sequence.request.params.max_tokens - sequence.num_new_tokens

    @property
    def request_id(self) -> int:
        """Number of the request."""
        return self.request.request_id

    @property
    def can_move(self) -> bool:
        """True if its rows can be moved: those of images are not, and such a request has room for its longest text."""
        return self.request.images is None

    @property
    def can_give_way(self) -> bool:
        """True if it may give its room to a shorter one: once, between two rounds of decoding."""
        return self.can_move and self.gave_way_at is None and not self.sequence.prompt_tokens_left

    def gave_way_before(self, time: float) -> bool:
        """Return whether it gave its room to a shorter one before that time."""
        return self.gave_way_at is not None and self.gave_way_at < time

    @property
    def is_waited_for(self) -> bool:
        """True if it is short of candidates, and the drafter was heard since it was waited for last."""
        return self.sequence.stats.drafter_passes != self.unheard_at and self.sequence.is_short_of_candidates

    def refresh(self, now: float, status: LinkStatus, policy: Policy) -> None:
        """Bring those counters up to date that the worker does not know. ``status`` is that of the drafter."""
        stats = self.sequence.stats
        stats.wall_s = now - self.started_at
        stats.prefill_s = stats.prefill_s or stats.wall_s
        if status.state != "none":
            stats.drafter_restarts = status.num_restarts - self.restarts_before
            stats.drafter, stats.drafter_reason = status.state, status.reason
            stats.schedule, stats.schedule_reason = policy.schedule, policy.reason
        if not self.sequence.request.params.speculates:
            stats.schedule, stats.schedule_reason = "off", "the request wants none"
        elif stats.declined:
            stats.schedule, stats.schedule_reason = "off", stats.declined

    def new_drafter_work(self) -> tuple[float, int]:
        """Return the seconds and passes that the drafter has reported for this request since the last call."""
        stats = self.sequence.stats
        busy_s, passes = stats.drafter_busy_s - self.busy_seen_s, stats.drafter_passes - self.passes_seen
        self.passes_seen, self.busy_seen_s = stats.drafter_passes, stats.drafter_busy_s
        return busy_s, passes
