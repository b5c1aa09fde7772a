"""A drafter in a process of its own that is kept busy: what it and a target beside it take from each other.

Two processes share memory bandwidth, caches and the clock of their cores, so that neither is as fast as alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

from card.assembly.drafters import DraftSource, make_drafter
from card.assembly.plan import Plan
from card.config import DraftSettings, SamplingParams
from card.drafting.messages import Close, Layer
from card.engine.metrics import RequestStats
from card.engine.replica import Replica
from card.errors import WorkerError
from card.machine.pass_cost import PassCost

BUSY = {"lead": 128, "beam_width": 16, "min_path_logprob": -1e9}  # a plan with these has room for all beams
BUSY_DRAFT = DraftSettings(**BUSY)  # type: ignore[arg-type]
LONGEST_WAIT_S = 5.0
_FULL_FROM = 3  # layers after which a beam has its width
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on the clock of this machine, seconds."""

    began: float
    ended: float


@dataclass(slots=True)
class Drafted:
    """What a drafter did between two calls. Times are seconds."""

    answer_s: float  # from the request to the first word of the drafter, which was idle: two ways of a message
    began: list[float] = field(default_factory=list)  # when the passes of a full beam began
    message_s: list[float] = field(default_factory=list)  # of the target's time, for each message

    def periods(self, within: Span | None = None) -> list[float]:
        """Return the seconds from one pass to the next, of those that lie within a span if there is one."""
        found = list(pairwise(self.began))
        if within is not None:
            found = [(a, b) for a, b in found if a >= within.began and b <= within.ended]
        return [b - a for a, b in found]


class BusyDrafter:
    """A drafter in its own process that drafts for one text, on and on, while other things are timed."""

    def __init__(self, plan: Plan, source: DraftSource, text: Sequence[int]) -> None:
        """Bring the drafter up; to be closed.

        Args:
            plan: with the drafter in a process, and `BUSY` among its settings.
            text: token ids to draft behind.
        Raises: WorkerError if it does not come up.
        """
        self._vocab_size = source.vocab_size
        self._text = tuple(text)
        self._num_opened = 0
        self._drafter = make_drafter(plan, source)
        self._link = self._drafter.link
        self._link.start()
        self._replica: Replica | None = None
        self._drafted = Drafted(0.0)

    @property
    def cost(self) -> PassCost | None:
        """What the drafter found its passes to cost when it came up."""
        return self._drafter.reported()

    def begin(self, width: int) -> None:
        """Let it draft with a beam so wide; return when it does. Raises: WorkerError if nothing is heard of it."""
        draft = BUSY_DRAFT.replace(beam_width=width)
        self._num_opened += 1
        self._replica = Replica(
            self._num_opened,
            list(self._text),
            draft,
            SamplingParams(temperature=0.0, seed=0).resolved(),
            max_len=len(self._text) + 2 * draft.lead,
            vocab_size=self._vocab_size,
            stats=RequestStats(),
            shaping=None,
        )
        self._link.receive()  # what an earlier request left
        asked = time.perf_counter()
        self._link.send(self._replica.open_message())
        self._drafted = Drafted(0.0)
        self._hear(until=asked + LONGEST_WAIT_S, num_layers=1)
        self._drafted.answer_s = time.perf_counter() - asked
        self._hear(until=asked + LONGEST_WAIT_S, num_layers=1 + _FULL_FROM)

    def end(self, num_passes: int = 0) -> Drafted:
        """Let it rest after so many passes of a full beam at least, and return what it did since `begin`."""
        assert self._replica is not None
        deadline = time.perf_counter() + LONGEST_WAIT_S
        while len(self._drafted.began) < num_passes and time.perf_counter() < deadline:
            self._link.wait(_POLL_S)
            self._take()
        self._take()
        self._link.send(Close(self._num_opened))
        return self._drafted

    def close(self) -> None:
        """End the process."""
        self._link.close()

    def _hear(self, until: float, num_layers: int) -> None:
        """Wait for so many messages of the present request."""
        while len(self._drafted.message_s) < num_layers:
            if time.perf_counter() > until:
                raise WorkerError(f"the drafter says nothing ({self._link.status}); is the machine overloaded?")
            self._link.wait(_POLL_S)
            self._take()

    def _take(self) -> None:
        """Read what has come, as a target does."""
        assert self._replica is not None
        started = time.perf_counter()
        layers = [m for m in self._link.receive() if isinstance(m, Layer) and m.request_id == self._num_opened]
        for layer in layers:
            self._replica.receive(layer)
        if not layers:
            return
        self._drafted.message_s += [(time.perf_counter() - started) / len(layers)] * len(layers)
        self._drafted.began += [m.pass_span_s[0] for m in layers if m.pass_span_s and m.seq > _FULL_FROM]


def times_slower(busy_s: Sequence[float], alone_s: Sequence[float]) -> float:
    """Return how many times as long things take beside another as alone; 1 at least, and 1 where nothing is known."""
    return max(1.0, mean(busy_s) / mean(alone_s)) if busy_s and alone_s else 1.0
