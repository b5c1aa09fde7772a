"""Reports of an engine's work to a trace; without a trace nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed

from card.config import Schedule
from card.drafting.messages import Layer, TargetMessage
from card.engine.request import StepResult
from card.engine.sequence import Sequence, Work
from card.engine.trace import MIXED, PREFILL, VERIFY, Trace


class NoTracing:
    """Receives all reports of an engine and records nothing."""

    trace: Trace | None = None
    """The trace that receives the reports."""

    def drafter_came(self) -> None:
        """A new drafter is there."""

    def layer(self, layer: Layer, sequence: Sequence | None) -> None:
        """A layer has arrived, for a running or a finished request."""

    def sent(self, messages: Iterable[TargetMessage]) -> None:
        """The engine sent these messages to the drafter."""

    def taken_up(self, request_id: int, arrived_at: float, now: float) -> None:
        """A request that arrived at ``arrived_at`` is admitted."""

    def ended(self, request_id: int) -> None:
        """A request has ended, finished or not."""

    def waited(self, started: float, seconds: float, *, takes_turns: bool) -> None:
        """The target waited for candidates, or for the turn of a drafter."""

    def passed(self, work: Listed[Work], result: StepResult, started: float, schedule: Schedule) -> None:
        """The target made a pass for this work, if there is any; the pass began at ``started``."""


class Tracing(NoTracing):
    """Records an engine's work in a trace."""

    trace: Trace

    def __init__(self, trace: Trace, clock: Callable[[], float]) -> None:
        """Write into ``trace``. ``clock`` is the engine's, in seconds."""
        self.trace = trace
        self._clock = clock

    def drafter_came(self) -> None:
        self.trace.drafter_came()

    def layer(self, layer: Layer, sequence: Sequence | None) -> None:
        self.trace.layer(layer, self._clock())
        if sequence is not None:
            self._follow(sequence)

    def sent(self, messages: Iterable[TargetMessage]) -> None:
        self.trace.sent(messages, self._clock())

    def taken_up(self, request_id: int, arrived_at: float, now: float) -> None:
        self.trace.begin(request_id, arrived_at, now)

    def ended(self, request_id: int) -> None:
        self.trace.end(request_id, self._clock())

    def waited(self, started: float, seconds: float, *, takes_turns: bool) -> None:
        if seconds:
            self.trace.wait(started, started + seconds, takes_turns=takes_turns)

    def passed(self, work: Listed[Work], result: StepResult, started: float, schedule: Schedule) -> None:
        if not work:
            return
        num_prompts = sum(one.num_prompt_tokens > 0 for one in work)
        name = VERIFY if not num_prompts else PREFILL if num_prompts == len(work) else MIXED
        details = {
            "requests": [one.request_id for one in work],
            "tokens": result.num_tokens,
            "candidates": sum(len(one.offer) for one in result.verified),
            "accepted": sum(len(one.accepted) for one in result.verified),
            "schedule": schedule,
        }
        self.trace.target_pass(name, started, started + result.busy_s, details)
        for one in work:
            self._follow(one.sequence)

    def _follow(self, sequence: Sequence) -> None:
        request_id, now = sequence.request.request_id, self._clock()
        self.trace.follow(request_id, sequence.stats, sequence.num_candidates, now)
