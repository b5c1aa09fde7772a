"""The timeline of a request: what target and drafter did when, drawn from a file that `card.workers.trace` wrote."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from card.bench.report.charts import slug
from card.bench.report.style import (
    FIFTH,
    FOURTH,
    GAIN,
    GRID,
    LOSS,
    MUTED,
    PAPER,
    SECOND,
    THIRD,
    Chart,
    Key,
    blank,
)
from card.errors import BenchError
from card.workers.trace import HIT, LATE_HIT, MISS, MIXED, PREFILL, STEP, TRACKS, TURN, VERIFY, WAIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PASSES = 10  # shown: more cannot be told apart on a phone
_LANE_PT = 36.0
_BAR_PT = 24.0
_LEVELS_PT = 84.0  # height of the line of candidates
_LEFT_PT = 84.0
_DRAWN = ("target", "drafter")
_LANES = {"target": 0, "requests": 1, "drafter": 2}
_SPANS = {  # what is drawn of the target's and the drafter's spans
    PREFILL: ("prefill", FIFTH),
    MIXED: ("verification with prefill", FOURTH),
    VERIFY: ("target pass", GAIN),
    WAIT: ("wait for candidates", LOSS),
    TURN: ("the drafter's turn", GRID),
    STEP: ("beam step", SECOND),
}
_MARKS = {HIT: ("hit", THIRD, "^"), LATE_HIT: ("late hit", SECOND, "D"), MISS: ("miss", LOSS, "X")}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing of the trace; a mark takes no time. Milliseconds since the trace began."""

    track: str
    name: str
    start_ms: float
    end_ms: float
    request_id: int | None  # None: of several
    num_candidates: int = 0  # of a level


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one trace of a file holds, all of it by start."""

    label: str  # such as the method; may be empty
    spans: tuple[Event, ...]
    marks: tuple[Event, ...]
    levels: tuple[Event, ...]

    @property
    def rounds(self) -> list[Event]:
        """The target passes that verified; all target passes if none did."""
        passes = [span for span in self.spans if span.track == "target" and span.name in (PREFILL, VERIFY, MIXED)]
        return [span for span in passes if span.name != PREFILL] or passes


def read_timelines(path: Path) -> list[Timeline]:
    """Return the traces of a file. Raises: BenchError if it holds none of CARD's."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        labels = {event["pid"]: _label(event) for event in events if event["name"] == "process_name"}
        found: dict[str, dict[str, list[Event]]] = {}
        for event in events:
            if event.get("cat") in TRACKS:
                lists = found.setdefault(labels[event["pid"]], {"X": [], "i": [], "C": []})
                lists[event["ph"]].append(_read(event))
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BenchError(
            f"{path} is no trace of card ({type(error).__name__}: {error}); give a file of card generate --trace"
        ) from error
    timelines = []
    for label, lists in found.items():
        spans, marks, levels = (tuple(sorted(lists[kind], key=lambda event: event.start_ms)) for kind in "XiC")
        timelines.append(Timeline(label, spans, marks, levels))
    timelines = [timeline for timeline in timelines if timeline.rounds]
    if not timelines:
        raise BenchError(f"{path} holds no target pass of card; give a file of card generate --trace")
    return timelines


def _label(event: Mapping[str, Any]) -> str:
    """Return what stands before the track in the name of a process."""
    label: str = event["args"]["name"].rpartition(": ")[0]
    return label


def _read(event: Mapping[str, Any]) -> Event:
    start_ms = float(event["ts"]) / 1e3
    args = event["args"]
    request_id, num_candidates = args.get("request"), int(args.get("candidates", 0))
    if event["ph"] == "C":
        request_id = event["tid"]
    end_ms = start_ms + float(event.get("dur", 0.0)) / 1e3
    if not 0 <= start_ms <= end_ms < math.inf:
        raise ValueError(f"an event from {start_ms} to {end_ms} ms")
    return Event(event["cat"], str(event["name"]), start_ms, end_ms, request_id, num_candidates)


def draw_timeline(timeline: Timeline) -> Chart:
    """Return the first rounds of a trace after the first token. Raises: BenchError if matplotlib is missing."""
    rounds = timeline.rounds[:_MOST_PASSES]
    first_ms, last_ms = rounds[0].start_ms, max(one.end_ms for one in rounds)
    spans = [
        s
        for s in timeline.spans
        if s.track in _DRAWN and s.name in _SPANS and s.end_ms > first_ms and s.start_ms < last_ms
    ]
    marks = [mark for mark in timeline.marks if mark.name in _MARKS and first_ms <= mark.start_ms <= last_ms]
    steps = _steps(timeline.levels, first_ms, last_ms)
    used = {event.name for event in (*spans, *marks)}
    keys = [Key(label, colour) for name, (label, colour) in _SPANS.items() if name in used]
    keys += [Key(label, colour, marker) for name, (label, colour, marker) in _MARKS.items() if name in used]
    keys += [Key("candidates in the cache", THIRD)] * bool(steps)
    body_pt = _LANE_PT * len(_LANES) + (_LEVELS_PT if steps else 0.0)
    title = f"Timeline{f' of {timeline.label}' if timeline.label else ''}: the first {len(rounds)} rounds"
    figure, axes = blank(title, body_pt, x_label="milliseconds", left_pt=_LEFT_PT, keys=keys)
    axes.set_xlim(0, max(last_ms - first_ms, 1e-6))
    axes.set_ylim(body_pt, 0)  # in points from the top
    heights = [_LANE_PT * (lane + 0.5) for lane in _LANES.values()]
    axes.set_yticks(heights, ["target", "outcome", "drafter"])
    axes.locator_params(axis="x", nbins=4)
    for span in spans:
        y = heights[_LANES[span.track]]
        start, length = span.start_ms - first_ms, span.end_ms - span.start_ms
        axes.barh([y], [length], _BAR_PT, left=[start], color=_SPANS[span.name][1], edgecolor=PAPER, linewidth=0.7)
    for mark in marks:
        _, colour, marker = _MARKS[mark.name]
        axes.plot([mark.start_ms - first_ms], [heights[_LANES["requests"]]], marker, color=colour, markersize=9)
    if steps:
        _draw_steps(axes, steps, first_ms, body_pt, heights)
    return Chart(slug("timeline", timeline.label), title, "", in_words(timeline), figure)


def in_words(timeline: Timeline) -> str:
    """Return what the whole trace says, from its first verification on."""
    rounds = timeline.rounds
    first_ms, last_ms = rounds[0].start_ms, rounds[-1].end_ms
    whole_ms = max(last_ms - first_ms, 1e-9)

    def share(*names: str) -> str:
        inside = [s for s in timeline.spans if s.name in names]
        busy_ms = sum(max(0.0, min(s.end_ms, last_ms) - max(s.start_ms, first_ms)) for s in inside)
        return f"{busy_ms / whole_ms:.0%}"

    counts = Counter(mark.name for mark in timeline.marks)
    return (
        f"{len(rounds)} rounds in {whole_ms:.0f} ms: the target computes {share(VERIFY, MIXED)} of the "
        f"time, waits {share(WAIT)} and leaves {share(TURN)} to the drafter, which computes {share(STEP)}; "
        f"hits {counts[HIT]}, late hits {counts[LATE_HIT]}, misses {counts[MISS]}."
    )


def _steps(levels: Sequence[Event], first_ms: float, last_ms: float) -> list[tuple[float, int]]:
    """Return how many candidates all requests have together, from when on, within the window; [] if never any."""
    held: dict[int | None, int] = {}
    steps: list[tuple[float, int]] = []
    for level in levels:
        if level.start_ms > last_ms:
            break
        held[level.request_id] = level.num_candidates
        step = (max(level.start_ms, first_ms), sum(held.values()))
        if steps and steps[-1][0] == step[0]:
            steps.pop()
        steps.append(step)
    return [*steps, (last_ms, steps[-1][1])] if any(count for _, count in steps) else []


def _draw_steps(
    axes: Axes, steps: Sequence[tuple[float, int]], first_ms: float, bottom: float, heights: Sequence[float]
) -> None:
    """Draw the candidates as a line below the lanes, with an axis of its own from 0 to the most there were."""
    top = bottom - _LEVELS_PT + 20
    most = max(count for _, count in steps)
    times = [at_ms - first_ms for at_ms, _ in steps]
    line = [bottom - (bottom - top) * count / most for _, count in steps]
    axes.fill_between(times, line, bottom, step="post", color=THIRD, alpha=0.25, linewidth=0)
    axes.step(times, line, where="post", color=THIRD, linewidth=1.5)
    axes.axhline(bottom, color=MUTED, linewidth=1)
    labels = [*(label.get_text() for label in axes.get_yticklabels()), str(most), "0"]
    axes.set_yticks([*heights, top, bottom], labels)
