"""A request on its way through an engine: one object from the check to the last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from card.engine.policy.rounds import Policy
from card.engine.request import Request
from card.engine.sequence import Sequence
from card.links.link import LinkStatus


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that a target can run, with what the engine knows of it.

    It is checked, then it waits, then it runs, with pauses if memory is short: the queue knows its state. Times are on
    the engine's clock.
    """

    request: Request  # as the caller made it
    num_rows: int  # most KV rows it may need: its longest text and the largest tree
    num_spare_rows: int  # rows beyond its text that any of its passes may write
    arrived_at: float = 0.0  # when it began to wait
    sequence: Sequence = field(init=False)  # set at admission, like all fields below
    started_at: float = 0.0
    restarts_before: int = 0  # of the drafter
    age: int = 0  # number in the order of admission
    passes_seen: int = 0  # of the drafter, for this request
    busy_seen_s: float = 0.0
    gave_way_at: float | None = None  # when it had to give its room to a shorter request; None: never
    was_pushed_out: bool = False  # an older request has taken its room, and it has not resumed yet
    unheard_at: int = -1  # drafter passes when the last wait ran out; no further wait until there are more

    def take_up(self, sequence: Sequence, now: float, *, num_restarts: int, age: int) -> None:
        """Admit the request: it begins to run."""
        self.sequence, self.started_at, self.restarts_before, self.age = sequence, now, num_restarts, age

    def rows_for(self, num_tokens: int) -> int:
        """Return the KV rows needed while the text has at most this many tokens."""
        return min(self.num_rows, num_tokens + self.num_spare_rows)

    @property
    def tokens_left(self) -> int:
        """Most tokens that the text may still get."""
        sequence = self.sequence
        return sequence.request.params.max_tokens - sequence.num_new_tokens

    @property
    def request_id(self) -> int:
        """Number of the request."""
        return self.request.request_id

    @property
    def can_move(self) -> bool:
        """True if its rows can be moved. Rows of images cannot; such a request has room for its longest text."""
        return self.request.images is None

    @property
    def can_give_way(self) -> bool:
        """True if it may give its room to a shorter request: once, between two rounds of decoding."""
        return self.can_move and self.gave_way_at is None and not self.sequence.prompt_tokens_left

    def gave_way_before(self, time: float) -> bool:
        """Return whether it gave its room to a shorter request before that time."""
        return self.gave_way_at is not None and self.gave_way_at < time

    @property
    def is_waited_for(self) -> bool:
        """True if it is short of candidates, and the drafter has sent something since the last wait."""
        return self.sequence.stats.drafter_passes != self.unheard_at and self.sequence.is_short_of_candidates

    def refresh(self, now: float, status: LinkStatus, policy: Policy) -> None:
        """Update the counters that the worker does not know. ``status`` is that of the drafter."""
        stats = self.sequence.stats
        stats.wall_s = now - self.started_at
        stats.prefill_s = stats.prefill_s or stats.wall_s
        if status.state != "none":
            stats.drafter_restarts = status.num_restarts - self.restarts_before
            stats.drafter, stats.drafter_reason = status.state, status.reason
            stats.schedule, stats.schedule_reason = policy.schedule, policy.reason
        if not self.sequence.request.params.speculates:
            stats.schedule, stats.schedule_reason = "off", "the request turns it off"
        elif stats.declined:
            stats.schedule, stats.schedule_reason = "off", stats.declined

    def new_drafter_work(self) -> tuple[float, int]:
        """Return the seconds and passes that the drafter has reported for this request since the last call."""
        stats = self.sequence.stats
        busy_s, passes = stats.drafter_busy_s - self.busy_seen_s, stats.drafter_passes - self.passes_seen
        self.passes_seen, self.busy_seen_s = stats.drafter_passes, stats.drafter_busy_s
        return busy_s, passes
