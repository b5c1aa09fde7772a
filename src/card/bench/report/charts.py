"""The plots of one pair on one workload, all made of its rows' summaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from card.bench.report.style import (
    FIFTH,
    GAIN,
    GRID,
    INK,
    INSIDE_PT,
    LINE_PT,
    LOSS,
    MUTED,
    PAPER,
    SECOND,
    SERIES,
    TEXT_PT,
    Chart,
    Key,
    blank,
    text_width_pt,
    wrapped,
)
from card.bench.summary import Percentiles, RowSummary, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR_PT = 16.0
_GAP_PT = 14.0  # below each row of a bar chart
_PANEL_PT = 190.0  # height of a line plot
_ROWS_PER_PANEL = len(SERIES)
_PER_TOKEN = "candidates per emitted token"


@dataclass(frozen=True, slots=True)
class _Bar:
    """One bar of a row: from ``start`` to ``end``, perhaps with a range; a thin line, or only a mark at its end."""

    end: float
    colour: str
    start: float = 0.0
    least: float | None = None
    most: float | None = None
    marker: str | None = None  # set: no bar but this mark
    is_thin: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    """One method in a bar chart: its name and figures in words above its bars."""

    name: str
    words: str
    lanes: tuple[tuple[_Bar, ...], ...]  # bars that lie on one another share a lane
    colour: str = INK


_Describe = Callable[[RowSummary], _Row | None]


def charts_of(rows: Sequence[RowSummary], where: str, baseline: str) -> list[Chart]:
    """Return the plots of one pair on one workload; one that has nothing to show is left out.

    Args:
        where: pair, workload and run in words: in the names of the plots and on their pictures, but not in their
            titles, as the page has them above all plots.

    Raises: BenchError if matplotlib is missing.
    """
    latency_keys = [Key("p50: half are faster", GAIN, "o"), Key("p90", SECOND, "D"), Key("p99", LOSS, "|")]
    ceiling_keys = [Key("tokens/s", GAIN), Key("ceiling: drafter layers/s", SECOND, "|")]
    candidate_keys = [Key("verified by the target", GAIN), Key("drafted and rolled back", LOSS)]
    hit_keys = [Key("in the cache at once", GAIN), Key("turned up later", SECOND)]
    pass_keys = [Key("target passes", GAIN), Key("drafter passes", SECOND)]

    def bars(kind: str, title: str, x_label: str, describe: _Describe, keys: list[Key], **how: Any) -> list[Chart]:
        described = [found for row in rows if (found := describe(row)) is not None]
        return _bar_chart(kind, title, where, x_label, described, keys, **how)

    hits_label = "verifications whose next token was a candidate, %"
    between_label = "milliseconds; tokens of one pass come at once"
    return [
        *speedups(rows, where, baseline),
        *bars("ceiling", "Speed against the drafter's ceiling", "tokens per second", _ceiling, ceiling_keys),
        *acceptances(rows, where),
        *bars("first-token", "Time to first token", "milliseconds", partial(_latency, "first_token"), latency_keys),
        *bars("inter-token", "Time between tokens", between_label, partial(_latency, "inter_token"), latency_keys),
        *bars("candidates", "Candidates per emitted token", _PER_TOKEN, _candidates, candidate_keys),
        *bars("hits", "Hit rate", hits_label, _hits, hit_keys, most=100.0),
        *bars("passes", "Passes for all samples", "passes", _passes, pass_keys),
    ]


def speedups(rows: Sequence[RowSummary], where: str, baseline: str) -> list[Chart]:
    """Return how fast each row is against the baseline, the fastest first; slower ones in another colour."""
    shown = [(row.row, row.speedup) for row in rows if row.speedup is not None and row.row != baseline]
    shown.sort(key=lambda one: -one[1].median)
    bars = []
    for name, speedup in shown:
        colour = GAIN if speedup.median >= 1 else LOSS
        bar = _Bar(speedup.median, colour, least=speedup.least, most=speedup.most)
        bars.append(_Row(name, in_words(speedup), ((bar,),), INK if colour == GAIN else LOSS))
    title = f"Speed-up over {baseline}"
    x_label = f"tokens/s over {baseline}'s (median and range of repeats)"
    keys = [Key("faster", GAIN)] * any(row.colour == INK for row in bars)
    keys += [Key("slower", LOSS)] * any(row.colour == LOSS for row in bars)
    return _bar_chart("speedup", title, where, x_label, bars, keys, reference=1.0)


def in_words(speedup: Spread) -> str:
    """Return a speed-up with its range, and that it is none."""
    words = f"{speedup.median:.2f}× ({speedup.least:.2f}–{speedup.most:.2f})"
    return words if speedup.median >= 1 else f"{words} slower"


# ---- what the bars of a row show; None if it has nothing to show -----------------------------------------------------


def _ceiling(row: RowSummary) -> _Row | None:
    layers_per_s, share = row.costs.drafter_layers_per_s, row.costs.ceiling_share
    if not layers_per_s or share is None:
        return None
    rate = row.tokens_per_s.median
    words = f"{rate:.0f} of {layers_per_s:.0f}/s, {share:.0%}"
    return _Row(row.row, words, ((_Bar(rate, GAIN), _Bar(layers_per_s, SECOND, marker="|")),))


def _latency(name: str, row: RowSummary) -> _Row | None:
    found: Percentiles | None = getattr(row, name)
    if found is None:
        return None
    p50, p90, p99 = (1e3 * value for value in (found.p50, found.p90, found.p99))
    words = " / ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" for ms in (p50, p90, p99))
    line = _Bar(p99, FIFTH, start=p50, is_thin=True)
    marks = _Bar(p50, GAIN, marker="o"), _Bar(p90, SECOND, marker="D"), _Bar(p99, LOSS, marker="|")
    return _Row(row.row, f"{words} ms", ((line, *marks),))


def _candidates(row: RowSummary) -> _Row | None:
    verified, rolled_back = row.costs.verified_per_emitted, row.costs.rolled_back_per_emitted
    if verified is None:
        return None
    words = f"{verified:.2f}" if rolled_back is None else f"{verified:.2f}, {rolled_back:.2f} rolled back"
    return _pair(row, words, (verified, GAIN), (rolled_back, LOSS))


def _hits(row: RowSummary) -> _Row | None:
    costs = row.costs
    if costs.hit_rate is None or costs.hits is None:
        return None
    at_once = min(1.0, costs.hits / costs.target_passes) if costs.target_passes else 0.0
    lane = (_Bar(100 * at_once, GAIN), _Bar(100 * costs.hit_rate, SECOND, start=100 * at_once))
    return _Row(row.row, f"{costs.hit_rate:.0%}", (lane,))


def _passes(row: RowSummary) -> _Row:
    target, drafter = row.costs.target_passes, row.costs.drafter_passes or None
    words = f"{target:,} and {drafter:,}" if drafter else f"{target:,}"
    return _pair(row, words, (target, GAIN), (drafter, SECOND))


def _pair(row: RowSummary, words: str, *bars: tuple[float | None, str]) -> _Row:
    """Return a row with a bar below the other, those left out that have no value."""
    return _Row(row.row, words, tuple((_Bar(value, colour),) for value, colour in bars if value is not None))


# ---- drawing ---------------------------------------------------------------------------------------------------------


def acceptances(rows: Sequence[RowSummary], where: str) -> list[Chart]:
    """Return what share of the candidates at each depth was kept, a few rows to a plot."""
    curves = [(row.row, row.costs.acceptance_per_depth) for row in rows if row.costs.acceptance_per_depth]
    count = -(-len(curves) // _ROWS_PER_PANEL)
    deepest = max((len(shares) for _, shares in curves), default=0)
    made = []
    for part in range(count):
        shown = curves[part * _ROWS_PER_PANEL : (part + 1) * _ROWS_PER_PANEL]
        styles = SERIES[: len(shown)]
        title = f"Acceptance by depth{f' ({part + 1} of {count})' if count > 1 else ''}"
        keys = [Key(name, colour, marker) for (name, _), (colour, marker) in zip(shown, styles, strict=True)]
        labels = {"x_label": "depth of the candidate, tokens", "y_label": "kept, of rounds that offered one, %"}
        figure, axes = blank(title, _PANEL_PT, left_pt=48, keys=keys, **labels)
        for (_, shares), (colour, marker) in zip(shown, styles, strict=True):
            depths = range(1, 1 + len(shares))
            heights = [100 * share for share in shares]
            axes.plot(depths, heights, color=colour, marker=marker, markersize=7, linewidth=2)
        axes.set_ylim(0, 104)
        axes.set_xlim(0.7, deepest + 0.3)
        step = -(-deepest // 8)
        axes.set_xticks(range(1, deepest + 1, step))
        axes.set_yticks(range(0, 101, 25))
        axes.grid(axis="both", color=GRID, linewidth=1)
        alt = "; ".join(f"{name} " + ", ".join(f"{share:.0%}" for share in shares) for name, shares in shown)
        name = slug("acceptance", where, *([str(part + 1)] if count > 1 else []))
        made.append(Chart(name, title, where, alt, figure))
    return made


def slug(*parts: str) -> str:
    """Return parts of a file name, made of nothing but letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def _bar_chart(
    kind: str,
    title: str,
    where: str,
    x_label: str,
    rows: Sequence[_Row],
    keys: Sequence[Key],
    *,
    reference: float | None = None,
    most: float | None = None,
) -> list[Chart]:
    """Return the chart; none of no rows. Names stand above the bars, so that both have the whole width of a phone."""
    if not rows:
        return []
    names = [wrapped(row.name, INSIDE_PT) for row in rows]
    for lines, row in zip(names, rows, strict=True):
        if text_width_pt(f"{row.name}  {row.words}") > INSIDE_PT:
            lines.append("")  # the figures stand on a line of their own
    tops = [LINE_PT * len(lines) + 4 for lines in names]  # of a row's first bar
    heights = [top + _BAR_PT * len(row.lanes) + _GAP_PT for row, top in zip(rows, tops, strict=True)]
    figure, axes = blank(title, sum(heights), x_label=x_label, keys=keys)
    ends = [value for row in rows for lane in row.lanes for bar in lane for value in (bar.end, bar.most or 0.0)]
    axes.set_xlim(0, most or 1.04 * max(*ends, reference or 0.0, 1e-9))
    axes.set_ylim(sum(heights), 0)  # in points from the top
    axes.set_yticks([])
    axes.locator_params(axis="x", nbins=4)
    if reference is not None:
        axes.axvline(reference, color=MUTED, linewidth=1.5, zorder=3)
    start = 0.0
    for row, lines, top, height in zip(rows, names, tops, heights, strict=True):
        for i, line in enumerate(lines):
            _write(axes, 0, start + LINE_PT * (i + 0.5), line, ha="left", color=INK)
        _write(axes, 1, start + LINE_PT * (len(lines) - 0.5), row.words, ha="right", color=row.colour)
        for i, lane in enumerate(row.lanes):
            for bar in lane:
                _draw_bar(axes, bar, start + top + _BAR_PT * (i + 0.5))
        start += height
    alt = "; ".join(f"{row.name} {row.words}" for row in rows)
    return [Chart(slug(kind, where), title, where, alt, figure)]


def _write(axes: Axes, x: float, y: float, text: str, *, ha: Literal["left", "right"], color: str) -> None:
    """Write text at ``x`` of the width on a ground of its own, so that no line of the plot strikes it through."""
    ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    look: dict[str, Any] = {"size": TEXT_PT, "color": color, "ha": ha, "va": "center_baseline", "parse_math": False}
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), bbox=ground, **look)


def _draw_bar(axes: Axes, bar: _Bar, y: float) -> None:
    if bar.marker is not None:
        width = 3.0 if bar.marker == "|" else 1.0
        axes.plot([bar.end], [y], bar.marker, color=bar.colour, markersize=11, markeredgewidth=width, clip_on=False)
        return
    height = 2.0 if bar.is_thin else _BAR_PT - 3
    axes.barh([y], [bar.end - bar.start], height, left=[bar.start], color=bar.colour)
    if bar.least is not None and bar.most is not None:
        axes.plot([bar.least, bar.most], [y, y], color=INK, linewidth=2, marker="|", markersize=9, markeredgewidth=2)
