"""The plots of one pair on one workload: bars that `page.html` draws, beside their figures in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from card.tools.bench.report.table import in_words
from card.tools.bench.summary import Percentiles, RowSummary

GAIN, LOSS, SECOND, INK, FIFTH = "gain", "loss", "second", "ink", "fifth"  # colours of the page, by their names there


Key = tuple[str, str]  # label and colour


@dataclass(frozen=True, slots=True)
class Bar:
    """From ``start`` to ``end``; a thin line, or only a mark at the end."""

    end: float
    colour: str
    start: float = 0.0
    kind: Literal["bar", "line", "mark"] = "bar"


@dataclass(frozen=True, slots=True)
class Line:
    """One method: its name and figures in words, above its bars."""

    name: str
    words: str
    lanes: tuple[tuple[Bar, ...], ...] = ()  # bars that overlap share a lane
    shares: tuple[float, ...] = ()  # instead of bars: a column for each, in [0, 1]
    is_loss: bool = False


_Describe = Callable[[RowSummary], Line | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """Methods one below the other, with bars on one scale."""

    title: str
    unit: str
    keys: tuple[Key, ...]
    lines: tuple[Line, ...]
    reference: float | None = None

    @property
    def most(self) -> float:
        """The end of the scale."""
        ends = [bar.end for line in self.lines for lane in line.lanes for bar in lane]
        return max(*ends, self.reference or 0.0, 1e-9)


def charts_of(rows: Sequence[RowSummary], baseline: str) -> list[Chart]:
    """Return the plots of one pair on one workload; one that has nothing to show is left out."""

    def chart(title: str, unit: str, describe: _Describe, *keys: Key, reference: float | None = None) -> Chart:
        return Chart(title, unit, keys, tuple(line for row in rows if (line := describe(row))), reference)

    percentiles = (("p50: half are faster", GAIN), ("p90", SECOND), ("p99", LOSS))
    ceiling = (("tokens/s", GAIN), ("ceiling: drafter layers/s", SECOND))
    candidates = (("verified by the target", GAIN), ("drafted and rolled back", LOSS))
    hits, hits_unit = (("in the cache at once", GAIN), ("turned up later", SECOND)), "verifications, to 100 %"
    passes = (("target passes", GAIN), ("drafter passes", SECOND))
    between = "milliseconds; tokens of one pass come at once"
    charts = [
        _speedups(rows, baseline),
        chart("The drafter's tokens against its ceiling", "tokens per second", _ceiling, *ceiling),
        chart("Acceptance by depth", "kept, of rounds that offered a candidate of depth 1, 2, ...", _acceptance),
        chart("Time to first token", "milliseconds", lambda row: _latency(row, row.first_token), *percentiles),
        chart("Time between tokens", between, lambda row: _latency(row, row.inter_token), *percentiles),
        chart("Candidates per emitted token", "candidates", _candidates, *candidates),
        chart("Hit rate: next token was a candidate", hits_unit, _hits, *hits, reference=1.0),
        chart("Passes for all samples", "passes", _passes, *passes),
    ]
    return [chart for chart in charts if chart.lines]


def _speedups(rows: Sequence[RowSummary], baseline: str) -> Chart:
    """Return the speed of each row relative to the baseline, the fastest first; slower ones in another colour."""

    def lines() -> Iterator[tuple[float, Line]]:
        for row in rows:
            if row.speedup is not None and row.row != baseline:
                median, is_loss = row.speedup.median, row.speedup.median < 1
                lane = (Bar(median, LOSS if is_loss else GAIN), Bar(row.speedup.most, INK, row.speedup.least, "line"))
                yield median, Line(row.row, in_words(row.speedup), (lane,), is_loss=is_loss)

    shown = tuple(line for _, line in sorted(lines(), key=lambda one: -one[0]))
    are_losses = {line.is_loss for line in shown}
    keys = tuple((("slower", LOSS) if is_loss else ("faster", GAIN)) for is_loss in sorted(are_losses))
    unit = f"tokens/s over {baseline}'s (median and range of repeats)"
    return Chart(f"Speed-up over {baseline}", unit, keys, shown, reference=1.0)


# ---- the line of a row; None if it has nothing to show ---------------------------------------------------------------


def _ceiling(row: RowSummary) -> Line | None:
    layers_per_s, share = row.costs.drafter_layers_per_s, row.costs.ceiling_share
    if not layers_per_s or share is None:
        return None
    rate = share * layers_per_s
    lane = (Bar(rate, GAIN), Bar(layers_per_s, SECOND, kind="mark"))
    return Line(row.row, f"{rate:.0f} of {layers_per_s:.0f}/s, {share:.0%}", (lane,))


def _acceptance(row: RowSummary) -> Line | None:
    shares = row.costs.acceptance_per_depth
    return Line(row.row, "", shares=shares) if shares else None


def _latency(row: RowSummary, percentiles: Percentiles | None) -> Line | None:
    if percentiles is None:
        return None
    p50, p90, p99 = (1e3 * value for value in (percentiles.p50, percentiles.p90, percentiles.p99))
    words = " / ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" for ms in (p50, p90, p99))
    marks = (Bar(end, colour, kind="mark") for end, colour in ((p50, GAIN), (p90, SECOND), (p99, LOSS)))
    return Line(row.row, f"{words} ms", ((Bar(p99, FIFTH, p50, "line"), *marks),))


def _candidates(row: RowSummary) -> Line | None:
    verified, rolled_back = row.costs.verified_per_emitted, row.costs.rolled_back_per_emitted
    if verified is None:
        return None
    words = f"{verified:.2f}" if rolled_back is None else f"{verified:.2f}, {rolled_back:.2f} rolled back"
    return _pair(row, words, verified, (rolled_back, LOSS))


def _hits(row: RowSummary) -> Line | None:
    costs = row.costs
    if costs.hit_rate is None or costs.hits is None:
        return None
    at_once = costs.hits / costs.target_passes if costs.target_passes else 0.0
    return Line(row.row, f"{costs.hit_rate:.0%}", ((Bar(at_once, GAIN), Bar(costs.hit_rate, SECOND, at_once)),))


def _passes(row: RowSummary) -> Line:
    target, drafter = row.costs.target_passes, row.costs.drafter_passes or None
    return _pair(row, f"{target:,} and {drafter:,}" if drafter else f"{target:,}", target, (drafter, SECOND))


def _pair(row: RowSummary, words: str, first: float, second: tuple[float | None, str]) -> Line:
    """Return a row with a bar below the other, unless the second one has no value."""
    value, colour = second
    return Line(row.row, words, ((Bar(first, GAIN),), *([(Bar(value, colour),)] if value is not None else [])))
