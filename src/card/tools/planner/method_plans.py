"""Predict each method on a pair and some hardware: its speed, best settings, use of time, effect of each knob."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from card.config import DraftSettings
from card.config.registry import find_method, methods
from card.errors import PlanError, SettingsError
from card.models.drafter_facts import DrafterFacts
from card.tools.planner.scenario import Scenario, plan_method
from card.tools.planner.simulate import Simulator, VirtualRun, sample_texts

# Settings of `DraftSettings` that are searched for each method, in this order.
KNOBS: Mapping[str, tuple[str, ...]] = {
    "vanilla": (),
    "sps": ("num_speculative_tokens",),
    "ouroboros": ("num_speculative_tokens", "budget"),
    "pearl": ("num_speculative_tokens",),
    "specbranch": ("num_speculative_tokens", "beam_width"),
    "ssd": ("num_speculative_tokens",),
    "card": ("beam_width", "budget", "lead"),
    "lookup": ("budget",),
    "suffix": ("budget",),
    "recycling": ("budget",),
    "lookahead": ("budget",),
    "pard": ("num_speculative_tokens",),
    "ctc": ("budget",),
    "sparsespec": ("num_speculative_tokens",),
    "specpv": ("lead",),
}
_BASELINE = "vanilla"
_MOST_STEPS = 4  # times that a knob is doubled or halved in a search
_WORTH_A_STEP = 1.005  # speed-up that a step of the search must bring
_LARGEST = {"num_speculative_tokens": 32, "beam_width": 64, "budget": 128, "lead": 96}


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Speed with half and with twice the value of a knob."""

    knob: str
    value: int
    halved: float | None  # relative to the speed with the value itself; None where half is not possible
    doubled: float | None


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """Expected figures of one method."""

    method: str
    where: str  # the drafter: none, inline, switch, process, thread or remote
    schedules: Mapping[str, int]  # texts by the schedule at their end
    tokens_per_s: float  # as shipped
    speed_up: float  # over plain decoding on all cores
    best_settings: Mapping[str, int]  # empty: as shipped is best
    best_tokens_per_s: float
    best_speed_up: float
    tokens_per_pass: float  # this and the following as shipped
    hit_rate: float
    shares: Mapping[str, float]  # of the decoding time: target, waiting, overhead; drafter, which may work beside them
    sensitivity: tuple[Sensitivity, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All methods, fastest first."""

    target: str
    draft: str
    recording: str
    num_texts: int
    num_tokens: int
    agreement: float
    is_measured: bool  # both profiles are
    sources: tuple[str, ...]
    cores: int | None
    concurrency: int
    network_s: float | None
    methods: tuple[MethodPlan, ...]
    drafter: DrafterFacts | None = None  # what the draft model is, and reads
    draft_row_bytes: int = 0  # of one token in the draft model's KV; 0: unknown
    left_out: Mapping[str, str] = field(default_factory=dict)  # methods that cannot run here, and why


def make_plan(
    scenario: Scenario, names: Sequence[str] = (), *, searches: bool = True, say: Callable[[str], None] = lambda _: None
) -> PlanReport:
    """Run the methods in virtual time.

    Args:
        names: which methods; empty: all that can run.
        searches: look for better settings, and for the effect of each.
        say: called with the method that runs next.
    Raises: SettingsError for an unknown method; PlanError if a named one cannot run here.
    """
    simulator = Simulator(scenario)
    say(_BASELINE)
    baseline = simulator.run(_BASELINE)
    plans: list[MethodPlan] = []
    left_out: dict[str, str] = {}
    for name in names or methods():
        find_method(name)
        say(name)
        try:
            plan_method(scenario, name, {})
        except (PlanError, SettingsError) as error:
            if names:
                raise
            left_out[name] = str(error)
            continue
        plans.append(_plan_one(simulator, name, baseline, searches=searches))
    profiles = (scenario.target, *([scenario.draft] if scenario.draft else []))
    return PlanReport(
        target=scenario.target.name,
        draft=scenario.draft.name if scenario.draft else "",
        recording=scenario.recording.source,
        num_texts=len(scenario.recording.texts),
        num_tokens=scenario.recording.num_tokens,
        agreement=scenario.recording.agreement(),
        is_measured=all(profile.measured for profile in profiles),
        sources=tuple(profile.source for profile in profiles),
        cores=scenario.num_threads,
        concurrency=scenario.concurrency,
        network_s=scenario.network_s,
        drafter=scenario.draft.drafter if scenario.draft else None,
        draft_row_bytes=scenario.draft.kv_row_bytes if scenario.draft else 0,
        methods=tuple(sorted(plans, key=lambda plan: -plan.best_tokens_per_s)),
        left_out=left_out,
    )


def _plan_one(simulator: Simulator, name: str, baseline: VirtualRun, *, searches: bool) -> MethodPlan:
    shipped = simulator.run(name)
    best_settings: dict[str, int] = {}
    best = shipped
    sensitivity: tuple[Sensitivity, ...] = ()
    if searches:
        search = _Search(simulator, name, shipped)
        best_settings = search.run()
        if best_settings:
            best = simulator.run(name, best_settings)
            if best.tokens_per_s <= shipped.tokens_per_s:  # better on some of the texts only
                best, best_settings = shipped, {}
        sensitivity = search.sensitivity(best_settings)
    spent = {
        "target": shipped.total.target_busy_s,
        "waiting": shipped.total.waited_s,  # for candidates, or for its turn
        "overhead": shipped.overhead_s,
        "drafter": shipped.total.drafter_busy_s,
    }
    return MethodPlan(
        method=name,
        where=shipped.where,
        schedules=shipped.schedules,
        tokens_per_s=shipped.tokens_per_s,
        speed_up=shipped.tokens_per_s / baseline.tokens_per_s,
        best_settings=best_settings,
        best_tokens_per_s=best.tokens_per_s,
        best_speed_up=best.tokens_per_s / baseline.tokens_per_s,
        tokens_per_pass=shipped.total.mean_acceptance_length,
        hit_rate=shipped.total.hit_rate,
        shares={name: spent_s / (shipped.total.decode_s or 1.0) for name, spent_s in spent.items()},
        sensitivity=sensitivity,
    )


class _Search:
    """Doubles or halves one knob after the other while that helps."""

    def __init__(self, simulator: Simulator, name: str, shipped: VirtualRun) -> None:
        self._simulator = simulator
        self._name = name
        self._knobs = KNOBS[name]
        self._speeds: dict[tuple[tuple[str, int], ...], float] = {}
        self._text_idxs = sample_texts(simulator.scenario)
        defaults = DraftSettings()
        self._shipped = {knob: int(getattr(defaults, knob)) for knob in self._knobs}
        if "num_speculative_tokens" in self._shipped:
            self._shipped["num_speculative_tokens"] = shipped.num_speculative_tokens

    def run(self) -> dict[str, int]:
        """Return the knobs whose best value is not the shipped one."""
        best: dict[str, int] = {}
        speed = self._speed(best)
        for knob in self._knobs:
            for factor in (2.0, 0.5):
                value = self._shipped[knob]
                for _ in range(_MOST_STEPS):
                    value = self._scaled(knob, value, factor)
                    tried = self._speed({**best, knob: value})
                    if tried is None or speed is None or tried < _WORTH_A_STEP * speed:
                        break
                    best, speed = {**best, knob: value}, tried
                if knob in best:
                    break
        return best

    def sensitivity(self, settings: Mapping[str, int]) -> tuple[Sensitivity, ...]:
        """Return the effect of half and twice of each knob, the others as in ``settings``."""
        base = self._speed(settings)
        values = []
        for knob in self._knobs:
            value = settings.get(knob, self._shipped[knob])
            speeds = [self._speed({**settings, knob: self._scaled(knob, value, factor)}) for factor in (0.5, 2.0)]
            halved, doubled = (speed / base if speed and base else None for speed in speeds)
            values.append(Sensitivity(knob, value, halved if value > 1 else None, doubled))
        return tuple(values)

    def _speed(self, settings: Mapping[str, int]) -> float | None:
        """Return the tokens/s on a part of the texts; None for settings that are not possible."""
        key = tuple(sorted(settings.items()))
        if key not in self._speeds:
            try:
                self._speeds[key] = self._simulator.run(self._name, settings, text_idxs=self._text_idxs).tokens_per_s
            except (SettingsError, PlanError):
                self._speeds[key] = 0.0
        return self._speeds[key] or None

    @staticmethod
    def _scaled(knob: str, value: int, factor: float) -> int:
        return max(1, min(round(value * factor), _LARGEST.get(knob, 1 << 16)))
