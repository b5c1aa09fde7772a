"""Timed passes of a pair, taken a few at a time between other work, and the profiles that they make."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median

import msgspec
from busy_drafter import BusyDrafter, Span, times_slower

from card.machine.pass_cost import PassCost
from card.machine.threads import pinned
from card.models.protocol import Extension, LanguageModel
from card.tools.bench.rows import SETTLE_S, core_set
from card.tools.planner.profile import Overheads, PassTable, Profile, Setup

TARGET_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (1, 2, 4, 8)  # of the beams beside the target
_NUM_STEPS = 12  # of a beam without a target beside it
_LEAST_BESIDE_S = 0.006  # for which the target is busy, so that a few steps of the drafter fall into it
_NUM_COLD = 4  # drafter passes behind one of the target's

Key = tuple[str, int, int]  # what, threads, tokens


class SampledModel:
    """A model with one sequence, whose passes are timed and undone."""

    def __init__(self, model: LanguageModel, num_rows: int, tokens: Sequence[int]) -> None:
        self.model, self.tokens, self.num_rows = model, tuple(tokens), num_rows
        self._slot = model.open(num_rows + max(tokens))
        model.forward([Extension(self._slot, [5] * num_rows, range(-1, num_rows - 1), num_rows - 1)])

    def pass_s(self, num_tokens: int) -> float:
        """Return the seconds of a pass over so many new tokens."""
        parents = range(self.num_rows - 1, self.num_rows - 1 + num_tokens)
        started = time.perf_counter()
        self.model.forward([Extension(self._slot, [5] * num_tokens, parents)])[0][-1, 0].item()
        seconds = time.perf_counter() - started
        self.model.keep(self._slot, self.num_rows)
        return seconds

    def steady_s(self, num_tokens: int) -> float:
        """Return the seconds of a pass behind another one of its size, as they follow each other in decoding."""
        self.pass_s(num_tokens)
        return self.pass_s(num_tokens)


@dataclass(frozen=True, slots=True)
class Places:
    """Cores of the pair."""

    target: tuple[int, ...]  # beside a drafter
    draft: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Those of plain decoding, and of turns."""
        return self.target + self.draft


class Sampler:
    """Takes samples of one kind at a time; `take` goes through the kinds in turn."""

    def __init__(self, target: SampledModel, draft: SampledModel, busy: BusyDrafter, places: Places) -> None:
        self._target, self._draft, self._busy, self.places = target, draft, busy, places
        self._seconds: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))  # by repeat
        self._repeat = 0
        self._widths = itertools.cycle(WIDTHS)
        few, many = len(places.target), len(places.all)
        kinds: tuple[Callable[[], None], ...] = (
            lambda: self._passes("target", target, places.target),
            self._beside,
            lambda: self._passes("target", target, places.all),
            lambda: self._passes("draft", draft, places.draft),
            self._steps,
            lambda: self._turns(many),
            lambda: self._turns(few),
        )
        self.num_kinds = len(kinds)
        self._kinds = itertools.cycle(kinds)

    def take(self, repeat: int, num_kinds: int = 1) -> None:
        """Take the next kinds of samples, on account of this repeat."""
        self._repeat = repeat
        for _ in range(num_kinds):
            next(self._kinds)()

    def seconds(self, what: str, threads: int, tokens: int) -> float:
        """Return the median over repeats of the mean seconds; there must be samples."""
        return median(mean(runs) for runs in self._seconds[what, threads, tokens].values())

    def pooled(self, what: str, threads: int, tokens: int) -> list[float]:
        """Return all samples."""
        return list(itertools.chain(*self._seconds[what, threads, tokens].values()))

    def taken(self, what: str, threads: int) -> PassTable:
        """Return what the sampled passes of a model took."""
        sampled = self._target if what == "target" else self._draft
        return PassTable(points=tuple((tokens, self.seconds(what, threads, tokens)) for tokens in sampled.tokens))

    # ---- kinds ------------------------------------------------------------------------------------------------------

    def _add(self, what: str, threads: int, tokens: int, *seconds: float) -> None:
        if seconds:
            self._seconds[what, threads, tokens][self._repeat] += seconds

    @contextmanager
    def _on(self, cores: tuple[int, ...], model: SampledModel) -> Iterator[int]:
        """Be on these cores, with the model's weights at hand; yields the number of threads."""
        with pinned(core_set(cores, len(cores))):
            time.sleep(SETTLE_S)
            model.pass_s(1)
            yield len(cores)

    def _passes(self, what: str, model: SampledModel, cores: tuple[int, ...]) -> None:
        with self._on(cores, model) as threads:
            for tokens in model.tokens:
                self._add(what, threads, tokens, model.steady_s(tokens))

    def _beside(self) -> None:
        """Time the target while the drafter is busy, and the drafter meanwhile."""
        with self._on(self.places.target, self._target) as threads:
            for tokens in self._target.tokens:
                width = next(self._widths)
                self._busy.begin(width)
                self._target.pass_s(tokens)
                began = ended = time.perf_counter()
                while ended - began < _LEAST_BESIDE_S:
                    self._add("target beside", threads, tokens, self._target.pass_s(tokens))
                    ended = time.perf_counter()
                drafted = self._busy.end()
                self._add("step beside", 1, width, *drafted.periods(Span(began, ended)))
                self._add("message", 1, 0, *drafted.message_s)

    def _steps(self) -> None:
        """Time the drafter in its process while the target rests."""
        with pinned(core_set(self.places.target, 1)):
            time.sleep(SETTLE_S)
            for width in WIDTHS:
                self._busy.begin(width)
                drafted = self._busy.end(num_passes=_NUM_STEPS)
                self._add("step", 1, width, *drafted.periods())
                self._add("way", 1, 0, drafted.answer_s / 2)

    def _turns(self, threads: int) -> None:
        """Time the draft model's passes on the target's cores, warm and behind a pass of the target."""
        cores = self.places.all[:threads]
        with self._on(cores, self._draft):
            if threads != len(self.places.draft):
                for tokens in self._draft.tokens:
                    self._add("draft", threads, tokens, self._draft.steady_s(tokens))
            warm = [self._draft.pass_s(1) for _ in range(_NUM_COLD)]
            self._target.pass_s(4)
            cold = [self._draft.pass_s(1) for _ in range(_NUM_COLD)]
            self._add("cold", threads, 1, sum(cold) - sum(warm))


@dataclass(frozen=True, slots=True)
class Known:
    """What is measured once, before the samples: latencies as an engine is told them, and time around the passes."""

    costs: dict[int, PassCost]  # by threads
    overheads: Overheads


def make_profiles(names: tuple[str, str], sampler: Sampler, known: tuple[Known, Known]) -> tuple[Profile, Profile]:
    """Return the profiles of target and draft model."""
    target, draft = known
    around = target.overheads
    message_s, way_s = sampler.pooled("message", 1, 0), sampler.pooled("way", 1, 0)
    target_around = msgspec.structs.replace(
        around,
        message_s=median(message_s) if message_s else around.message_s,
        latency_s=median(way_s) if way_s else around.latency_s,
        beside_factor=_target_factor(sampler),
        source="samples between the runs",
    )
    cold_s = max(0.0, sampler.seconds("cold", max(draft.costs), 1))
    draft_around = msgspec.structs.replace(
        draft.overheads,
        cold_s=cold_s,
        cold_later_s=min(cold_s, draft.overheads.cold_later_s),
        beside_factor=1.0,
        source="samples between the runs",
    )
    drafts = _profile(names[1], "draft", sampler, draft, draft_around)
    factor = _drafter_factor(sampler, drafts)
    return (
        _profile(names[0], "target", sampler, target, target_around),
        msgspec.structs.replace(drafts, overheads=msgspec.structs.replace(draft_around, beside_factor=factor)),
    )


def _profile(name: str, what: str, sampler: Sampler, known: Known, around: Overheads) -> Profile:
    setups = tuple(
        Setup(threads=threads, cost=PassTable.of(cost), taken=sampler.taken(what, threads))
        for threads, cost in known.costs.items()
    )
    return Profile(name=name, measured=True, source="samples", setups=setups, overheads=around)


def _target_factor(sampler: Sampler) -> float:
    """Return how many times as long the target's passes take beside a busy drafter."""
    threads = len(sampler.places.target)
    seconds = [
        [sampler.seconds(what, threads, tokens) for tokens in TARGET_TOKENS] for what in ("target beside", "target")
    ]
    return times_slower(*seconds)


def _drafter_factor(sampler: Sampler, draft: Profile) -> float:
    """Return how many times as long the drafter's steps take in its process, beside a target, as the profile says."""
    around, cost = draft.overheads, draft.setup_of(1).true_cost()
    measured, planned = [], []
    for width in WIDTHS:
        if sampler.pooled("step beside", 1, width):
            measured.append(sampler.seconds("step beside", 1, width))
            planned.append(cost.seconds(width) + around.step_s + around.node_s * width)
    return times_slower(measured, planned)
