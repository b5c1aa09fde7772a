"""The synchronous loop of CARD's publication on this library's engine: query, verify and draft at once, correct.

In each round the target verifies the best path that the cache held before the round. Meanwhile the drafter makes a
fixed number of layers, without knowing what comes of it. Then the two meet: the tree is re-rooted, or begun anew after
a miss. Nothing here depends on how fast a machine is.

Source: CARD, arXiv:2508.04462, and its repository hunzhizi/CARD as of 24 May 2025.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from card.config import DraftSettings, SamplingParams, Schedule
from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.drafter import DrafterWorker
from card.drafting.messages import Correction, DrafterMessage, DraftSpec, Open, TargetMessage
from card.engine.engine import Engine
from card.engine.metrics import RequestStats
from card.engine.policy.rounds import Draft, Outcome, RoundView
from card.engine.request import Request, StopCheck
from card.engine.target import TargetWorker
from card.errors import SettingsError
from card.links.in_process import InlineLink
from card.machine.threads import CoreSet
from card.models.protocol import LanguageModel
from card.tree.nodes import NewNodes, Nodes

LAYERS_PER_ROUND = 7  # of the 1B drafter beside the 70B target
MOST_CHILDREN = 32  # kept of a node in both tiers; the publication keeps K
_LEAD = 50  # layers that its ring buffer holds
_MOST_NODES = 1 << 16
_NUM_SEQUENCES = 4  # of full length, that the drafter has memory for

Variant = Literal["card", "one-tier", "no-re-rooting", "no-re-rooting-turns"]
"""What of the method is left: all of it; no secondary tier; no correction of the tree; that, and drafting in turns."""

_DEEPEST = 1 << 16  # layers of a best path, more than there are


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What differs between two runs."""

    beam_width: int  # K; 1 keeps the best path alone
    layers_per_round: int = LAYERS_PER_ROUND
    variant: Variant = "card"

    @property
    def draft(self) -> DraftSettings:
        """How the tree grows. No candidate is left out for being unlikely, as in the publication."""
        return DraftSettings(
            verify="chain",
            growth="layer",
            beam_width=self.beam_width,
            branch=min(self.beam_width, MOST_CHILDREN),
            lead=_LEAD,
            budget=_LEAD,
            max_nodes=min(_LEAD * self.beam_width, _MOST_NODES),
            min_verify_prob=0.0,
            min_path_logprob=-1e9,
            num_speculative_tokens=self.layers_per_round,
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """One text and what it took."""

    token_ids: tuple[int, ...]
    stats: RequestStats


@dataclass(slots=True)
class Counts:
    """What happened in the rounds of some texts. A round is one target pass after the one that reads the prompt."""

    num_texts: int = 0
    num_tokens: int = 0  # after the first of each text
    target_passes: int = 0
    accepted_tokens: int = 0
    zero_rounds: int = 0  # rounds that accepted nothing
    hits: int = 0  # rounds whose next token was in the tree
    late_hits: int = 0  # rounds whose next token was in the secondary tier
    new_trees: int = 0
    drafter_passes: int = 0
    last_rounds: int = 0  # rounds that ended their text: no token is looked up

    @classmethod
    def of(cls, all_stats: Iterable[RequestStats]) -> Counts:
        """Sum up."""
        counts = cls()
        for stats in all_stats:
            counts.num_texts += 1
            counts.num_tokens += stats.num_new_tokens - 1
            counts.target_passes += stats.target_passes
            counts.accepted_tokens += stats.accepted_tokens
            counts.zero_rounds += stats.target_passes - sum(stats.accepted_per_depth[:1])
            counts.hits += stats.hits
            counts.late_hits += stats.late_hits
            counts.new_trees += stats.misses
            counts.drafter_passes += stats.drafter_passes
            counts.last_rounds += stats.target_passes > 0
        return counts

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass, its own one included."""
        return self.num_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the rounds that a further one follows whose next token was in the tree."""
        lookups = self.target_passes - self.last_rounds
        return self.hits / lookups if lookups else 0.0

    @property
    def zero_rate(self) -> float:
        """Share of the rounds that accepted nothing."""
        return self.zero_rounds / self.target_passes if self.target_passes else 0.0


class PaperRounds:
    """A policy: draft so many layers in each round, and verify what was there before them."""

    reason = "as published"
    undrafted: Mapping[int, str] = MappingProxyType({})

    def __init__(self, settings: LoopSettings, worker: TargetWorker) -> None:
        self._worker = worker
        self._depths: list[int] = []
        self.schedule: Schedule = "turns"
        self.cores = self.reading_cores = CoreSet()
        self._num_layers = settings.layers_per_round
        self._verifies_new_layers = settings.variant == "no-re-rooting-turns"

    def begin(self, num_requests: int, available: frozenset[Schedule]) -> None:
        """Nothing changes."""

    def beam_width(self) -> int | None:
        """Leave it as it is set."""
        return None

    def writer_budget(self, request: Request) -> int:
        """Return what the settings say."""
        return request.draft.budget

    def prepare(self, view: RoundView) -> Draft | None:
        """Note how deep the best paths are, then draft."""
        running = [self._worker.find(request.request_id) for request in view.requests]
        self._depths = [len(one.replica.tree.query(_DEEPEST, "chain")) if one else 0 for one in running]
        return Draft(self._num_layers)

    def choose(self, view: RoundView, offers: Sequence[Nodes]) -> Sequence[Nodes]:
        """Return the best paths as far as they were there: layers made since only lengthen them."""
        if self._verifies_new_layers:
            return offers
        return [offer.leading(min(depth, len(offer))) for offer, depth in zip(offers, self._depths, strict=True)]

    def observe(self, outcome: Outcome) -> None:
        """Nothing is learnt."""


class OneTierWriter(BeamWriter):
    """A writer whose beams forget each candidate that did not make it into the tree."""

    _beam: BeamSequence | None = None

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> BeamSequence:
        """Start the beam of a request."""
        self._beam = beam = super().open(token_ids, spec, epoch=epoch)
        beam.cache.refill = lambda count, min_path_logprob: NewNodes.none()  # type: ignore[method-assign]
        return beam

    @property
    def is_stuck(self) -> bool:
        """Nothing is left to expand: all children of what was expanded had been cut."""
        return self._beam is not None and not self._beam.frontier()


class RestartingWorker:
    """A drafter that begins anew from the text where it should correct its tree, always or when that is stuck."""

    def __init__(self, worker: DrafterWorker, *, corrects: bool, is_stuck: Callable[[], bool] = lambda: False) -> None:
        """Wrap a worker.

        Args:
            corrects: it takes corrections, and begins anew only if it is stuck then.
        """
        self.step, self.begin_turn, self.clock = worker.step, worker.begin_turn, worker.clock
        self.layers_per_pass = worker.layers_per_pass
        self._worker = worker
        self._corrects, self._is_stuck = corrects, is_stuck
        self._opened: dict[int, Open] = {}

    @property
    def is_idle(self) -> bool:
        """A step would do nothing."""
        return self._worker.is_idle

    def receive(self, message: TargetMessage) -> list[DrafterMessage]:
        """Take one message of the target and return the replies."""
        if isinstance(message, Open):
            self._opened[message.request_id] = message
        if not isinstance(message, Correction):
            return self._worker.receive(message)
        replies = self._worker.receive(message) if self._corrects else []
        opened = self._opened[message.request_id]
        text = (*opened.token_ids[: message.start], *message.token_ids)
        self._opened[message.request_id] = Open(message.request_id, text, opened.spec)
        if not self._corrects or self._is_stuck():
            replies += self._worker.receive(self._opened[message.request_id])
        return replies


class Loop:
    """The loop for one text after the other."""

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        settings: LoopSettings | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the loop; without a draft model it is plain decoding. Raises: SettingsError."""
        self._ids = itertools.count()
        self._draft = settings.draft if settings is not None else DraftSettings()
        worker = TargetWorker(target, clock=clock)
        if draft is None or settings is None:
            self._engine = Engine(worker, None, clock=clock)
            self._has_drafter = False
            return
        if settings.beam_width < 1 or settings.layers_per_round < 1:
            raise SettingsError(f"widths and layers must be 1 or more, got {settings}")
        link = _make_link(draft, settings, clock)
        self._engine = Engine(worker, link, policy=PaperRounds(settings, worker), clock=clock)
        self._has_drafter = True

    def decode(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        end_ids: frozenset[int] = frozenset(),
        stop_check: StopCheck | None = None,
    ) -> Decoded:
        """Continue a prompt greedily. Raises: CardError if that fails."""
        self._engine.forget_prefixes()
        request = Request(
            request_id=next(self._ids),
            prompt_ids=tuple(prompt_ids),
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens).resolved(),
            draft=self._draft,
            end_ids=end_ids,
            stop_check=stop_check,
            uses_drafter=self._has_drafter,
        )
        self._engine.add(self._engine.check(request))
        token_ids: list[int] = []
        while True:
            for update in self._engine.step():
                if update.error is not None:
                    raise update.error
                token_ids += update.token_ids
                if update.finish_reason is not None:
                    return Decoded(tuple(token_ids), update.stats)


@dataclass(slots=True)
class RoundClock:
    """Virtual seconds of rounds in which two models run: at once, so that the slower one counts, or in turns."""

    takes_turns: bool = False
    now: float = 0.0
    _drafting_s: float = field(default=0.0, init=False)

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def draft(self, seconds: float) -> None:
        """Count a drafter pass of the present round."""
        self._drafting_s += seconds

    def verify(self, seconds: float, overhead_s: float = 0.0) -> None:
        """Count the target pass, which ends the round, and what both spend on meeting."""
        both_s = self._drafting_s + seconds if self.takes_turns else max(self._drafting_s, seconds)
        self.now += both_s + overhead_s
        self._drafting_s = 0.0


def _make_link(draft: LanguageModel, settings: LoopSettings, clock: Callable[[], float]) -> InlineLink:
    kv_cache_bytes = _NUM_SEQUENCES * draft.max_rows * draft.row_bytes
    writer = (OneTierWriter if settings.variant == "one-tier" else BeamWriter)(draft, kv_cache_bytes)
    if settings.variant == "card":
        return InlineLink(DrafterWorker(writer, clock=clock))
    if isinstance(writer, OneTierWriter):
        wrapped = RestartingWorker(DrafterWorker(writer, clock=clock), corrects=True, is_stuck=lambda: writer.is_stuck)
    else:
        wrapped = RestartingWorker(DrafterWorker(writer, clock=clock), corrects=False)
    return InlineLink(wrapped)  # type: ignore[arg-type]  # the same
