"""Timeline of one engine, written for Perfetto and chrome://tracing.

The engine reports its own rounds to a `Trace`. The drafter's passes come from its layers, which carry their times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from card.drafting.messages import Correction, Layer, TargetMessage
from card.engine.metrics import RequestStats

Track = Literal["target", "drafter", "requests"]
TRACKS: tuple[Track, ...] = ("target", "drafter", "requests")
WAIT, TURN, STEP = "wait", "drafter's turn", "beam step"  # names of spans
PREFILL, VERIFY, MIXED = "prefill", "verify", "verify and prefill"  # the same, of target passes
HIT, LATE_HIT, MISS, CORRECTION = "hit", "late hit", "miss", "correction"  # names of marks
MOST_EVENTS = 1_000_000  # of one trace: some hundred megabytes, hours of one request
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """An event with a duration. Times are seconds of the engine's clock."""

    track: Track
    name: str
    start_s: float
    end_s: float
    request_id: int | None = None  # None: of several requests, or of none
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """An event without a duration."""

    track: Track
    name: str
    at_s: float
    request_id: int | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """Number of a request's candidates in the target's replica from this moment on."""

    request_id: int
    at_s: float
    num_candidates: int


@dataclass(slots=True)
class _Seen:
    """Known facts of one request while it runs."""

    hits: int = 0
    late_hits: int = 0
    misses: int = 0
    num_candidates: int = 0
    began_at: float | None = None  # None: it ran before the trace began
    first_token_at: float | None = None


@dataclass(slots=True)
class _DrafterPass:
    """One pass as reported by the layers of its requests, on the drafter's own clock."""

    drafter_idx: int
    start_s: float
    end_s: float
    arrived_s: float  # on the engine's clock
    request_ids: list[int]
    num_nodes: int


class Trace:
    """Records the work of one engine; reads no clock and keeps a bounded number of events.

    Drafter passes without candidates, such as those that only read a prompt, are not recorded.
    """

    num_dropped: int
    """Events that were dropped as the trace was full."""
    marks: list[Mark]
    """All marks in the order in which they were recorded."""
    levels: list[Level]
    """All levels in the order in which they were recorded."""

    def __init__(self, *, shares_clock: bool = True, max_events: int = MOST_EVENTS) -> None:
        """Begin an empty trace.

        Args:
            shares_clock: the drafter's clock is the engine's, as on one Linux host. If not, its passes are shifted by
                the shortest apparent travel time of its layers: no pass ends after its layer arrived.
            max_events: most events kept; later ones are only counted.
        """
        self.num_dropped = 0
        self._shares_clock = shares_clock
        self._max_events = max_events
        self._num_events = 0
        self._spans: list[Span] = []
        self.marks, self.levels = [], []
        self._passes: dict[tuple[int, float, float], _DrafterPass] = {}
        self._drafter_idx = 0
        self._seen: dict[int, _Seen] = {}
        self._latest_s = -math.inf

    # ---- reported by the engine -------------------------------------------------------------------------------------

    def begin(self, request_id: int, arrived_at: float, now: float) -> None:
        """A request that arrived at ``arrived_at`` is admitted."""
        self._seen[request_id] = _Seen(began_at=now)
        self._latest_s = max(self._latest_s, now)
        if now > arrived_at:
            self._span(Span("requests", "queued", arrived_at, now, request_id))

    def end(self, request_id: int, now: float) -> None:
        """A request has ended, finished or not."""
        seen = self._seen.pop(request_id, None)
        if seen is not None:
            for span in _phases(request_id, seen, now):
                self._span(span)
            self._level(request_id, seen, now, 0)

    def wait(self, start_s: float, end_s: float, *, takes_turns: bool) -> None:
        """The target waited for candidates, or for the turn of a drafter."""
        self._span(Span("target", TURN if takes_turns else WAIT, start_s, end_s))

    def target_pass(self, name: str, start_s: float, end_s: float, details: Mapping[str, Any]) -> None:
        """The target made a pass."""
        self._span(Span("target", name, start_s, end_s, None, details))

    def sent(self, messages: Iterable[TargetMessage], now: float) -> None:
        """The engine sent these messages to the drafter."""
        for message in messages:
            if isinstance(message, Correction):
                self._mark(Mark("target", CORRECTION, now, message.request_id))

    def drafter_came(self) -> None:
        """A new drafter is there, perhaps with another clock."""
        self._drafter_idx += 1

    def layer(self, layer: Layer, now: float) -> None:
        """A layer has arrived. Its times identify its pass and repetitions; impossible times are ignored."""
        began_s, ended_s = layer.pass_span_s or (0.0, 0.0)
        if not 0 < ended_s - began_s < math.inf:  # a NaN fails too
            return
        key = (self._drafter_idx, began_s, ended_s)
        known = self._passes.get(key)
        if known is None:
            if self._has_room(now):
                self._passes[key] = _DrafterPass(*key, now, [layer.request_id], len(layer.nodes))
        elif layer.request_id not in known.request_ids:
            known.request_ids.append(layer.request_id)
            known.num_nodes += len(layer.nodes)

    def follow(self, request_id: int, stats: RequestStats, num_candidates: int, now: float) -> None:
        """Record what changed in the counters of a running request since the last call.

        For a request that began before the trace, the first call only notes its counters.
        """
        seen = self._seen.get(request_id)
        if seen is None:
            seen = self._seen[request_id] = _Seen(stats.hits, stats.late_hits, stats.misses)
        for name, count, before in (
            (HIT, stats.hits, seen.hits),
            (LATE_HIT, stats.late_hits, seen.late_hits),
            (MISS, stats.misses, seen.misses),
        ):
            for _ in range(count - before):
                self._mark(Mark("requests", name, now, request_id))
        seen.hits, seen.late_hits, seen.misses = stats.hits, stats.late_hits, stats.misses
        if seen.first_token_at is None and stats.num_new_tokens:
            seen.first_token_at = now
        self._level(request_id, seen, now, num_candidates)

    # ---- results ----------------------------------------------------------------------------------------------------

    @property
    def spans(self) -> list[Span]:
        """All spans by their start; a request that still runs ends with the latest event."""
        running = [span for i, seen in self._seen.items() for span in _phases(i, seen, self._latest_s)]
        return sorted([*self._spans, *self._drafter_spans(), *running], key=lambda span: (span.start_s, -span.end_s))

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _has_room(self, latest_s: float) -> bool:
        self._latest_s = max(self._latest_s, latest_s)
        has_room = self._num_events < self._max_events
        self._num_events += has_room
        self.num_dropped += not has_room
        return has_room

    def _span(self, span: Span) -> None:
        if self._has_room(span.end_s):
            self._spans.append(span)

    def _mark(self, mark: Mark) -> None:
        if self._has_room(mark.at_s):
            self.marks.append(mark)

    def _level(self, request_id: int, seen: _Seen, now: float, num_candidates: int) -> None:
        if num_candidates != seen.num_candidates and self._has_room(now):
            seen.num_candidates = num_candidates
            self.levels.append(Level(request_id, now, num_candidates))

    def _drafter_spans(self) -> list[Span]:
        passes = self._passes.values()
        shift_s: dict[int, float] = {}  # from a drafter's clock to the engine's
        if not self._shares_clock:
            for one in passes:
                travelled_s = one.arrived_s - one.end_s
                shift_s[one.drafter_idx] = min(travelled_s, shift_s.get(one.drafter_idx, math.inf))
        spans = []
        for one in passes:
            shift = shift_s.get(one.drafter_idx, 0.0)
            details = {"requests": one.request_ids, "candidates": one.num_nodes}
            owner = one.request_ids[0] if len(one.request_ids) == 1 else None
            spans.append(Span("drafter", STEP, one.start_s + shift, one.end_s + shift, owner, details))
        return spans


def _phases(request_id: int, seen: _Seen, end_s: float) -> list[Span]:
    """Return a request and its two phases; nothing if the trace did not see its beginning."""
    if seen.began_at is None:
        return []
    first_token_at = end_s if seen.first_token_at is None else seen.first_token_at
    phases = [Span("requests", f"request {request_id}", seen.began_at, end_s, request_id)]
    phases.append(Span("requests", PREFILL, seen.began_at, first_token_at, request_id))
    if seen.first_token_at is not None:
        phases.append(Span("requests", "decode", first_token_at, end_s, request_id))
    return phases


# ---- the Chrome trace format -----------------------------------------------------------------------------------------


def write_trace(file: TextIO, traces: Mapping[str, Trace], about: Mapping[str, str] | None = None) -> None:
    """Write `chrome_trace` of the same arguments as JSON."""
    json.dump(chrome_trace(traces, about), file, allow_nan=False)


def chrome_trace(traces: Mapping[str, Trace], about: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return traces in the format that Perfetto and chrome://tracing open, each beginning at time 0.

    Each trace has a process for the target, one for the drafter and one for the requests, with a thread for each.

    Args:
        traces: by the label that begins the names of their processes, such as the method; "" for none.
        about: facts about the run for the reader, shown among the file's metadata.
    Source: Trace Event Format, D. Sinclair and others, Google 2016: events X, i, C and M; times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for idx, (label, trace) in enumerate(traces.items()):
        first_pid = 1 + idx * len(TRACKS)
        events += _events(trace, {track: first_pid + i for i, track in enumerate(TRACKS)}, label)
    dropped = {"dropped events": str(n)} if (n := sum(trace.num_dropped for trace in traces.values())) else {}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**(about or {}), **dropped}}


def _events(trace: Trace, pids: Mapping[Track, int], label: str) -> list[dict[str, Any]]:
    spans, marks, levels = trace.spans, trace.marks, trace.levels
    starts = [*(s.start_s for s in spans), *(m.at_s for m in marks), *(level.at_s for level in levels)]
    zero_s = min(starts, default=0.0)

    def microseconds(at_s: float) -> float:
        return round((at_s - zero_s) * _MICROSECONDS, 3)

    timed: list[dict[str, Any]] = []

    def add(phase: str, track: Track, name: str, at_s: float, request_id: int | None, **more: Any) -> None:
        thread = (
            1 + request_id if track == "requests" and request_id is not None else 1
        )  # one for all passes of a worker
        place = {"pid": pids[track], "tid": thread, "ts": microseconds(at_s)}
        args = {} if request_id is None else {"request": request_id}
        timed.append({"ph": phase, "name": name, "cat": track, "args": args, **place, **more})

    for span in spans:
        add("X", span.track, span.name, span.start_s, span.request_id)
        timed[-1]["dur"] = round(max(0.0, microseconds(span.end_s) - timed[-1]["ts"]), 3)
        timed[-1]["args"] |= span.details
    for mark in marks:
        add("i", mark.track, mark.name, mark.at_s, mark.request_id, s="t")  # as tall as its thread
    for level in levels:
        name, args = f"candidates of request {level.request_id}", {"candidates": level.num_candidates}
        add("C", "requests", name, level.at_s, level.request_id, args=args)
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    threads = {(event["pid"], event["tid"]): event["args"].get("request") for event in timed if event["ph"] == "X"}
    return _names(pids, label, threads) + timed


def _names(
    pids: Mapping[Track, int], label: str, threads: Mapping[tuple[int, int], int | None]
) -> list[dict[str, Any]]:
    """Return the metadata that names processes and threads and puts them into order."""
    events: list[dict[str, Any]] = []

    def name(what: str, pid: int, tid: int, **args: Any) -> None:
        events.append({"ph": "M", "name": what, "cat": "__metadata", "pid": pid, "tid": tid, "ts": 0, "args": args})

    for track, pid in pids.items():
        name("process_name", pid, 0, name=f"{label}: {track}" if label else track)
        name("process_sort_index", pid, 0, sort_index=pid)
        for (thread_pid, tid), request_id in threads.items():
            if thread_pid == pid:
                name("thread_name", pid, tid, name=f"request {request_id}" if track == "requests" else "passes")
    return events
