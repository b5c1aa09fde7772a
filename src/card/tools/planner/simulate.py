"""Run a method in virtual time over the texts of a recording; measure its speed and use of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from card.assembly.build import Parts
from card.assembly.plan import Plan
from card.engine.metrics import RequestStats
from card.errors import PlanError
from card.tools.planner.own_drafts import has_own_drafter
from card.tools.planner.replayed_texts import ReplayedTexts
from card.tools.planner.scenario import Scenario, build_stage, make_request, plan_method, replayed_texts

_SAMPLE_TOKENS = 600
_NUM_WARM_UPS = 1  # texts decoded first, while a policy learns; they do not count


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """Figures of one method. Times are virtual seconds of decoding, without reading prompts."""

    method: str
    where: str  # of the drafter; none
    num_speculative_tokens: int
    schedules: Mapping[str, int]  # texts by the schedule at their end
    num_tokens: int  # after each first one
    decode_s: float  # of all texts; with several at once, from the first round to the last
    tokens_per_s: float
    total: RequestStats  # of all texts
    stats: tuple[RequestStats, ...]  # of each

    @property
    def overhead_s(self) -> float:
        """Seconds of rounds beyond passes and waiting."""
        return max(0.0, self.total.decode_s - self.total.target_busy_s - self.total.waited_s)


class Simulator:
    """Runs methods in one scenario; they share what was computed from the recording."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._texts: dict[tuple[int, str], ReplayedTexts] = {}

    def run(
        self, method: str, settings: Mapping[str, Any] | None = None, *, text_idxs: Sequence[int] = ()
    ) -> VirtualRun:
        """Run one method over the texts, ``concurrency`` of them at once.

        Args:
            settings: as of `card.LLM`, if a plan can follow them.
            text_idxs: which texts; empty: all.
        Raises: SettingsError, PlanError for settings that cannot be followed; PlanError if a text differs from
            the recorded one.
        """
        scenario = self.scenario
        plan = plan_method(scenario, method, settings or {})
        texts = self.texts(plan)
        parts = build_stage(scenario, plan, texts)
        chosen = list(text_idxs) or list(range(len(texts.prompts)))
        try:
            decode(parts, scenario, texts, chosen[:_NUM_WARM_UPS], first_id=0)
            started = parts.clock()
            stats = decode(parts, scenario, texts, chosen, first_id=len(chosen))
        finally:
            parts.close()
        return summary_of(plan, stats, parts.clock() - started if scenario.concurrency > 1 else None)

    def texts(self, plan: Plan) -> ReplayedTexts:
        """Return the texts with as many candidates as the plan reads."""
        key = plan.draft.branch, plan.method.name if has_own_drafter(plan.method) else ""
        made = self._texts.get(key)
        if made is None:
            made = self._texts[key] = replayed_texts(self.scenario, plan)
        return made


def sample_texts(scenario: Scenario) -> tuple[int, ...]:
    """Return the first texts, enough to compare settings on."""
    idxs: list[int] = []
    num_tokens = 0
    for idx, text in enumerate(scenario.recording.texts):
        if num_tokens >= _SAMPLE_TOKENS and len(idxs) >= scenario.concurrency:
            break
        idxs.append(idx)
        num_tokens += len(text.token_ids)
    return tuple(idxs)


def decode(
    parts: Parts, scenario: Scenario, texts: ReplayedTexts, text_idxs: Sequence[int], *, first_id: int
) -> list[RequestStats]:
    """Decode these texts and return their counters. Raises: PlanError if one differs from the recorded text."""
    waiting = list(enumerate(text_idxs, first_id))[::-1]
    answers: dict[int, list[int]] = {}
    wanted: dict[int, tuple[int, ...]] = {}
    stats: dict[int, RequestStats] = {}
    num_open = 0
    while waiting or num_open:
        while waiting and num_open < scenario.concurrency:
            request_id, text_idx = waiting.pop()
            parts.engine.forget_prefixes()
            parts.engine.add(parts.engine.check(make_request(parts, scenario, texts, text_idx, request_id)))
            answers[request_id], wanted[request_id] = [], texts.answers[text_idx]
            num_open += 1
        for update in parts.engine.step():
            if update.error is not None:
                raise update.error
            answers[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                num_open -= 1
                stats[update.request_id] = update.stats
                if tuple(answers[update.request_id]) != wanted[update.request_id]:
                    raise PlanError(f"text {update.request_id} differs from the recorded one: a bug in card")
    return [stats[request_id] for request_id in sorted(stats)]


def summary_of(plan: Plan, stats: Sequence[RequestStats], elapsed_s: float | None = None) -> VirtualRun:
    """Return the figures of a run; ``elapsed_s`` is its duration if texts were decoded at once."""
    total = RequestStats.joined(stats)
    num_tokens = total.num_new_tokens - len(stats)
    decode_s = total.decode_s if elapsed_s is None else elapsed_s
    return VirtualRun(
        method=plan.method.name,
        where="switch" if len(plan.placements) > 1 else next(iter(plan.placements.values()), "none"),
        num_speculative_tokens=plan.draft.num_speculative_tokens,
        schedules=dict(Counter(one.schedule for one in stats)),
        num_tokens=num_tokens,
        decode_s=decode_s,
        tokens_per_s=num_tokens / decode_s if decode_s > 0 else 0.0,
        total=total,
        stats=tuple(stats),
    )
