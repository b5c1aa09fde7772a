"""Figures of a run, computed from its samples: speeds and their ranges, speed-ups, latencies, the cost of candidates.

Medians and ranges are over repeats. A row's speed in a repeat is all its tokens over all its seconds. Of an incomplete
run, whole repeats count; if there is none, the prompts of the first repeat that all rows have answered.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product, zip_longest
from typing import TYPE_CHECKING

from card.engine.metrics import RequestStats
from card.tools.bench.records import GroupKey, ResultGroup, Run, Sample
from card.tools.bench.row_names import DRAFTER

_Z95 = 1.959964  # standard deviations that hold 95 % of a normal law

if TYPE_CHECKING:  # reading files must not load the engine
    from card.tools.bench.rows import Decoded


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeats."""

    median: float
    least: float
    most: float
    runs: tuple[float, ...]  # one per repeat

    @classmethod
    def of(cls, runs: Iterable[float]) -> Spread:
        """Return the spread of these figures, one or more."""
        values = tuple(runs)
        return cls(statistics.median(values), min(values), max(values), values)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The 50th, 90th and 99th percentile of some seconds (nearest rank)."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """Return the percentiles; None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in (50, 90, 99))
        return cls(p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of independent cases."""

    count: int
    of: int

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the true share with 95 % confidence, by Wilson's score interval (1927)."""
        share, spread = self.count / self.of, _Z95**2 / self.of
        centre = share + spread / 2
        half = _Z95 * (share * (1 - share) / self.of + spread / (4 * self.of)) ** 0.5
        return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))

    def __str__(self) -> str:
        """In percent, with the interval."""
        least, most = self.interval
        return f"{self.count / self.of:.0%} ({100 * least:.0f}–{100 * most:.0f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSummary:
    """Figures behind a speed, over all samples; None for what a method does not have or report."""

    target_passes: int
    mean_acceptance_length: float | None
    cores_used: float | None  # processor time over wall time of the target's process, prefill included
    target_pass_ms: float | None = None
    between_passes_ms: float | None = None
    waited_ms: float | None = None  # a drafter in turns drafts during it
    round_overhead_ms: float | None = None
    schedules: Mapping[str, int] | None = None  # texts by the schedule at their end
    verified_per_emitted: float | None = None
    rolled_back_per_emitted: float | None = None  # candidates of the likeliest path that were rejected
    dropped_per_emitted: float | None = None  # side branches included
    acceptance_rate: float | None = None
    acceptance_per_depth: tuple[float, ...] | None = None
    accepted_by_writer: Mapping[str, float] | None = None  # shares, the largest first
    drafter_passes: int | None = None
    hits: int | None = None
    late_hits: int | None = None
    misses: int | None = None
    hit_rate: float | None = None
    drafter_layers_per_s: float | None = None
    ceiling_share: float | None = None
    drafter_restarts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary(ResultGroup):
    """One row on one workload of one pair."""

    num_prompts: int
    num_repeats: int
    num_tokens: int  # of the first repeat
    tokens_per_s: Spread  # decoding alone: from the first token to the last
    wall_tokens_per_s: Spread  # reading the prompt included
    speedup: Spread | None  # tokens_per_s over the baseline's in the same repeat; None without a baseline
    first_token: Percentiles | None  # seconds from a request's start to its first token
    inter_token: Percentiles | None  # seconds from token to token; tokens of one pass arrive at once
    costs: CostSummary
    solved: Share | None = None  # questions with an answer whose text ends with it, in the first repeat
    same_number: Share | None = None  # of these, texts that end with the baseline's number


def summarise(run: Run) -> list[RowSummary]:
    """Return the figures of each pair, workload and row, in the run's order; incomplete ones are left out."""
    found: list[RowSummary] = []
    complete = _by_repeat(run)
    for pair, workload, row in product(run.pairs, run.workloads, run.rows):
        baseline = complete.get((pair.name, run.baseline, workload.name), [])
        if repeats := complete.get(key := (pair.name, row.name, workload.name)):
            summary = _summary(key, repeats, _ratio(repeats, baseline))
            found.append(replace(summary, same_number=_same_number(repeats, baseline)))
    return found


def complete_samples(run: Run) -> list[Sample]:
    """Return the samples that figures are made of: of each pair and workload, the repeats that all rows have completed.

    Without a whole repeat, these are the prompts of the first one that every row has answered in all turns.
    """
    turns = {workload.name: workload.turns for workload in run.workloads}
    answers: Counter[tuple[str, str, int, int]] = Counter(_cell(sample) for sample in run.samples)
    done = {cell for cell, count in answers.items() if count == len(run.rows) * turns[cell[1]][cell[3]]}
    prompts = Counter((pair, workload, repeat) for pair, workload, repeat, _ in done)
    whole = {key for key, count in prompts.items() if count == len(turns[key[1]])}
    with_whole = {key[:2] for key in whole}
    return [
        sample
        for sample in run.samples
        if (sample.pair, sample.workload, sample.repeat) in whole
        or ((sample.pair, sample.workload) not in with_whole and _cell(sample) in done)
    ]


def ratio(run: Run, row: str, baseline: str, *, pair: str, workload: str) -> Spread | None:
    """Return a row's tokens/s over another row's in the same repeat; None if one of them has no samples."""
    complete = _by_repeat(run)
    return _ratio(complete.get((pair, row, workload), []), complete.get((pair, baseline, workload), []))


def decode_rate(samples: Iterable[Sample | Decoded]) -> float:
    """Return decoded tokens per second of decoding, over all these samples together."""
    counted = [(sample.decode_tokens, sample.decode_s) for sample in samples]
    seconds = sum(one for _, one in counted)
    return sum(tokens for tokens, _ in counted) / seconds if seconds > 0 else 0.0


def costs_of(samples: Sequence[Sample]) -> CostSummary:
    """Return what these samples of one row cost."""
    passes, tokens = sum(s.target_passes for s in samples), sum(s.decode_tokens for s in samples)
    wall_s = sum(sample.wall_s for sample in samples)
    costs = CostSummary(
        target_passes=passes,
        mean_acceptance_length=tokens / passes if passes else None,
        cores_used=sum(sample.cpu_s for sample in samples) / wall_s if wall_s else None,
    )
    stats = [sample.stats for sample in samples if sample.stats is not None]
    if not stats or not passes:
        return costs
    total, schedules = RequestStats.joined(stats), Counter(one.schedule for one in stats)
    per_pass_ms = 1e3 / passes
    costs = replace(
        costs,
        target_pass_ms=per_pass_ms * total.target_busy_s,
        between_passes_ms=per_pass_ms * (total.decode_s - total.target_busy_s),
        waited_ms=per_pass_ms * total.waited_s,
        # A drafter in turns drafts between the passes, which is no overhead.
        round_overhead_ms=None if schedules["turns"] else total.round_overhead_ms,
        schedules=dict(schedules),
    )
    if total.verified_tokens:
        costs = _with_candidates(costs, total, tokens)
    return _with_drafter(costs, total, tokens) if total.drafter_passes else costs


# ---- inside ----------------------------------------------------------------------------------------------------------

_Repeats = list[list[Sample]]


def _cell(sample: Sample) -> tuple[str, str, int, int]:
    return sample.pair, sample.workload, sample.repeat, sample.prompt


def _by_repeat(run: Run) -> dict[GroupKey, _Repeats]:
    """Return the complete samples by pair, row and workload, in one list per repeat."""
    found: dict[GroupKey, dict[int, list[Sample]]] = {}
    for sample in complete_samples(run):
        repeats = found.setdefault(sample.group, {})
        repeats.setdefault(sample.repeat, []).append(sample)
    return {key: list(repeats.values()) for key, repeats in found.items()}


def _summary(key: GroupKey, repeats: _Repeats, speedup: Spread | None) -> RowSummary:
    samples = [sample for repeat in repeats for sample in repeat]
    gaps = [gap for sample in samples for gap in _gaps(sample)]
    walls = [sum(s.new_tokens for s in repeat) / sum(s.wall_s for s in repeat) for repeat in repeats]
    return RowSummary(
        *key,
        num_prompts=len({sample.prompt for sample in samples}),
        num_repeats=len(repeats),
        num_tokens=sum(sample.new_tokens for sample in repeats[0]),
        tokens_per_s=Spread.of(map(decode_rate, repeats)),
        wall_tokens_per_s=Spread.of(walls),
        speedup=speedup,
        first_token=Percentiles.of(sample.prefill_s for sample in samples),
        inter_token=Percentiles.of(gaps),
        costs=costs_of(samples),
        solved=_share([sample.is_solved for sample in repeats[0] if sample.is_solved is not None]),
    )


def _share(cases: Sequence[bool]) -> Share | None:
    return Share(sum(cases), len(cases)) if cases else None


def _same_number(repeats: _Repeats, baseline: _Repeats) -> Share | None:
    """Return the share of texts of the first repeat that end with the same number as the baseline's."""
    plain = {(s.prompt, s.turn): s.final_number for s in baseline[0] if s.is_solved is not None} if baseline else {}
    numbers = {(s.prompt, s.turn): s.final_number for s in repeats[0]}
    return _share([numbers[key] == number for key, number in plain.items() if key in numbers])


def _ratio(repeats: _Repeats, baseline: _Repeats) -> Spread | None:
    rates = [(decode_rate(row), decode_rate(plain)) for row, plain in zip(repeats, baseline, strict=False)]
    ratios = [rate / plain for rate, plain in rates if plain > 0]
    return Spread.of(ratios) if ratios else None


def _gaps(sample: Sample) -> list[float]:
    """Return the seconds before each token after those of the first pass."""
    gaps: list[float] = []
    for (before_s, before), (at_s, count) in pairwise(sample.token_times):
        gaps += [at_s - before_s, *[0.0] * (count - before - 1)] if count > before else []
    return gaps


def _with_candidates(costs: CostSummary, total: RequestStats, tokens: int) -> CostSummary:
    """Add the figures of the candidates of all writers."""
    depths = zip_longest(total.accepted_per_depth, total.offered_per_depth, fillvalue=0)
    by_writer = Counter(total.accepted_by_writer)
    if alone := total.accepted_tokens - by_writer.total():  # with the draft model alone, no writer is named
        by_writer[DRAFTER] += alone
    return replace(
        costs,
        mean_acceptance_length=total.mean_acceptance_length,
        verified_per_emitted=total.verified_tokens / tokens if tokens else None,
        acceptance_rate=total.acceptance_rate,
        acceptance_per_depth=tuple(accepted / offered for accepted, offered in depths),
        accepted_by_writer={name: count / total.accepted_tokens for name, count in by_writer.most_common()},
    )


def _with_drafter(costs: CostSummary, total: RequestStats, tokens: int) -> CostSummary:
    """Add the figures of the draft model."""
    layers_per_s = total.drafter_layers_per_s or None
    return replace(
        costs,
        drafter_passes=total.drafter_passes,
        hits=total.hits,
        late_hits=total.late_hits,
        misses=total.misses,
        hit_rate=total.hit_rate,
        rolled_back_per_emitted=total.rolled_back_tokens / tokens if tokens else None,
        dropped_per_emitted=total.drafter_dropped_nodes / tokens if tokens else None,
        drafter_restarts=total.drafter_restarts,
        drafter_layers_per_s=layers_per_s,
        ceiling_share=total.ceiling_share if layers_per_s else None,
    )
