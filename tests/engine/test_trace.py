"""Traces: what the engine did is what they say, and the file is one that Perfetto and chrome://tracing can open."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.cli import main
from card.config import DraftSettings, SamplingParams
from card.drafting.beam import BeamWriter
from card.drafting.drafter import DrafterWorker
from card.drafting.messages import Correction, Layer, Open
from card.engine.metrics import RequestStats
from card.engine.replica import draft_spec
from card.engine.trace import (
    CORRECTION,
    HIT,
    LATE_HIT,
    MISS,
    PREFILL,
    STEP,
    TURN,
    VERIFY,
    Span,
    Trace,
    chrome_trace,
    write_trace,
)
from card.tree.nodes import NewNodes
from tests.decoding import fake, inline, make_engine, make_request, plain, toy_draft, toy_target
from tests.examples import settings
from tests.pair import Pair
from tests.unreliable_link import Faults

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, seed=0, ignore_eos=True)
DRAFT = DraftSettings(beam_width=3, min_verify_prob=0.0)


def layer(began_at: float, ended_at: float, *, request_id: int = 7, seq: int = 0) -> Layer:
    """Return a layer of one node that came of this pass."""
    nodes = NewNodes((1,), (0,), (3,), (-0.5,))
    counts = {"num_passes": 1, "busy_s": 0.1, "num_reused": 0, "num_dropped": 0, "num_rolled_back": 0}
    place = {"epoch": 0, "is_reset": False, "root_id": 0, "root_position": 5, "known_len": 6}
    return Layer(request_id=request_id, seq=seq, **place, nodes=nodes, **counts, pass_span_s=(began_at, ended_at))


def traced(method: str = "card", faults: Faults | None = None, num_requests: int = 1) -> tuple[Trace, dict[int, Any]]:
    """Run requests on toy models; return the trace and each request's last update."""
    target = toy_target()
    draft = toy_draft(target, 0.7)
    engine = make_engine(target, fake(draft, faults) if faults else inline(draft), method)
    trace = engine.trace = Trace()
    for request_id in range(num_requests):
        engine.add(engine.check(make_request(request_id, method=method, draft=DRAFT)))
    last = {}
    while engine.has_work:
        last |= {update.request_id: update for update in engine.step()}
    return trace, last


def spans_of(trace: Trace, *names: str) -> list[Span]:
    return [span for span in trace.spans if span.name in names]


def counts_of(trace: Trace) -> Counter[str]:
    return Counter(mark.name for mark in trace.marks)


# ---- what the engine tells ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [None, Faults(seed=5, drop=0.1, duplicate=0.3, max_delay=2)])
def test_a_trace_has_every_target_pass_and_every_outcome_that_the_statistics_count(faults: Faults | None) -> None:
    trace, last = traced(faults=faults, num_requests=2)
    stats = [update.stats for update in last.values()]
    rounds = [span for span in spans_of(trace, VERIFY, "verify and prefill") if span.track == "target"]
    verified = [request_id for span in rounds for request_id in span.details["requests"]]
    assert Counter(verified) == {i: update.stats.target_passes for i, update in last.items()}
    assert sum(span.details["accepted"] for span in rounds) == sum(one.accepted_tokens for one in stats)
    assert sum(span.details["candidates"] for span in rounds) == sum(one.verified_tokens for one in stats)
    counts = counts_of(trace)
    assert counts[HIT] == sum(one.hits for one in stats)
    assert counts[LATE_HIT] == sum(one.late_hits for one in stats)
    assert counts[MISS] == sum(one.misses for one in stats)
    assert counts[HIT] + counts[LATE_HIT] + counts[MISS] > 0


def test_a_pass_that_the_drafter_made_for_several_requests_is_one_step() -> None:
    trace, last = traced(num_requests=2)
    steps = spans_of(trace, STEP)
    assert any(len(step.details["requests"]) == 2 for step in steps)
    told = Counter(request_id for step in steps for request_id in step.details["requests"])
    for request_id, update in last.items():
        assert 0 < told[request_id] <= update.stats.drafter_passes, "passes without candidates are not told"


def test_passes_and_waits_of_the_target_do_not_overlap_and_leave_the_drafter_its_turns() -> None:
    trace, _ = traced()
    of_target = [span for span in trace.spans if span.track == "target"]
    for before, after in itertools.pairwise(of_target):
        assert before.end_s <= after.start_s
    turns = spans_of(trace, TURN)
    for step in spans_of(trace, STEP):
        inside = [turn for turn in turns if turn.start_s <= step.start_s and step.end_s <= turn.end_s]
        assert len(inside) == 1, "a drafter that takes turns computes in its own"


def test_a_request_has_its_phases_and_its_corrections() -> None:
    trace, last = traced()
    whole, prefill, decode = (
        next(span for span in trace.spans if span.name == name and span.track == "requests")
        for name in ("request 0", PREFILL, "decode")
    )
    assert (whole.start_s, whole.end_s) == (prefill.start_s, decode.end_s)
    assert prefill.end_s == decode.start_s
    stats = last[0].stats
    assert counts_of(trace)[CORRECTION] == stats.target_passes, "one for the prefill, none for the last round"
    assert trace.levels[-1].num_candidates == 0, "the end of a request empties its cache"


def test_the_text_is_the_same_with_a_trace_and_without() -> None:
    target = toy_target()
    engine = make_engine(target, inline(toy_draft(target, 0.7)))
    assert engine.trace is None
    engine.trace = Trace()
    engine.add(engine.check(make_request(0)))
    token_ids = [token for _ in iter(lambda: engine.has_work, False) for u in engine.step() for token in u.token_ids]
    assert token_ids == plain(target)[0]


def test_a_trace_that_is_taken_away_hears_no_more_and_one_that_comes_late_tells_of_what_comes() -> None:
    target = toy_target()
    engine = make_engine(target, inline(toy_draft(target, 0.7)))
    engine.add(engine.check(make_request(0)))
    early, late = Trace(), Trace()
    engine.trace = early
    for _ in range(6):
        (update,) = engine.step()
    num_early, counted = len(spans_of(early, VERIFY)), early_counts(update.stats)
    engine.trace = late
    while engine.has_work:
        (update,) = engine.step()
    assert len(spans_of(early, VERIFY)) == num_early
    assert num_early + len(spans_of(late, VERIFY)) == update.stats.target_passes
    since = {name: count - counted[name] for name, count in early_counts(update.stats).items()}
    of_late = counts_of(late)
    first_round = sum(of_late[name] for name in since) - sum(since.values())
    assert -1 <= first_round <= 0, "at most the outcome of the round in which it came goes untold"
    assert not [span for span in late.spans if span.track == "requests"], "it did not see the request begin"


def test_outcomes_that_are_learnt_of_together_are_marks_of_their_own() -> None:
    trace, stats = Trace(), RequestStats()
    trace.begin(0, 0.0, 0.0)
    stats.late_hits, stats.misses = 3, 1
    trace.follow(0, stats, 0, now=1.0)
    trace.follow(0, stats, 0, now=2.0)
    assert [(mark.name, mark.at_s) for mark in trace.marks] == [(LATE_HIT, 1.0)] * 3 + [(MISS, 1.0)]


def early_counts(stats: RequestStats) -> dict[str, int]:
    return {HIT: stats.hits, LATE_HIT: stats.late_hits, MISS: stats.misses}


# ---- the drafter's clock --------------------------------------------------------------------------------------------


def test_a_layer_says_when_its_pass_began_and_ended_on_the_drafters_clock() -> None:
    ticks = itertools.count(100.0, 0.25)
    target = toy_target()
    worker = DrafterWorker(BeamWriter(toy_draft(target, 0.7)), clock=lambda: next(ticks))
    spec = draft_spec(DRAFT, GREEDY.resolved(), 64)
    (opening,) = worker.receive(Open(7, (3, 1, 4), spec))
    assert isinstance(opening, Layer)
    assert opening.pass_span_s is None, "no pass made it"
    (first,), (second,) = worker.step(), worker.step()
    assert isinstance(first, Layer)
    assert isinstance(second, Layer)
    assert first.pass_span_s == (100.0, 100.25)
    assert second.pass_span_s == (100.5, 100.75)
    assert second.busy_s == pytest.approx(0.5)


def test_a_clock_that_is_the_engines_is_believed() -> None:
    trace = Trace()
    trace.layer(layer(1.0, 2.0), now=5.0)
    (step,) = trace.spans
    assert (step.track, step.start_s, step.end_s, step.request_id) == ("drafter", 1.0, 2.0, 7)


@given(
    lengths=st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.0, 2.0)), min_size=1),
    offset=st.floats(-1e4, 1e4),
)
def test_passes_of_an_unknown_clock_keep_their_distances_and_end_before_their_layers_arrive(
    lengths: list[tuple[float, float, float]], offset: float
) -> None:
    trace, at_s, arrivals, ends = Trace(shares_clock=False), 50.0, [], []
    for pause_s, length_s, delay_s in lengths:
        at_s += pause_s
        ends.append(at_s + length_s)
        arrivals.append(ends[-1] + delay_s)
        trace.layer(layer(at_s + offset, ends[-1] + offset), now=arrivals[-1])
        at_s = ends[-1]
    steps = trace.spans
    shortest_s = min(delay_s for _, _, delay_s in lengths)
    for step, arrived_s, end_s in zip(steps, arrivals, ends, strict=True):
        assert step.end_s <= arrived_s + 1e-6
        assert step.end_s == pytest.approx(end_s + shortest_s, abs=1e-6), "true but for the shortest way"


def test_another_drafter_has_another_clock() -> None:
    trace = Trace(shares_clock=False)
    trace.layer(layer(1000.0, 1001.0), now=5.0)
    trace.drafter_came()
    trace.layer(layer(3.0, 4.0), now=9.0)
    assert [(step.start_s, step.end_s) for step in trace.spans] == [(4.0, 5.0), (8.0, 9.0)]


@pytest.mark.parametrize(
    ("began_at", "ended_at"),
    [(0.0, 0.0), (2.0, 1.0), (math.nan, 1.0), (1.0, math.nan), (1.0, math.inf), (-math.inf, 1.0)],
)
def test_times_that_are_none_make_no_step(began_at: float, ended_at: float) -> None:
    trace = Trace()
    trace.layer(layer(began_at, ended_at), now=5.0)
    assert trace.spans == []


def test_a_repeated_layer_is_no_second_step() -> None:
    trace = Trace()
    for now in (5.0, 6.0):
        trace.layer(layer(1.0, 2.0), now)
    assert len(trace.spans) == 1


# ---- the file -------------------------------------------------------------------------------------------------------

NUMBER = int | float
FIELDS: dict[str, dict[str, Any]] = {  # what the format asks of each kind of event, besides name and pid
    "X": {"cat": str, "tid": int, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "i": {"cat": str, "tid": int, "ts": NUMBER, "s": str, "args": dict},
    "C": {"ts": NUMBER, "args": dict},
    "M": {"args": dict},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}


def check_format(data: dict[str, Any]) -> None:
    """Check a file against the Trace Event Format: kinds, fields, names for all that is numbered, nested spans."""
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in data["otherData"].values())
    named: set[tuple[str, int, int]] = set()
    stacks: dict[tuple[int, int], list[float]] = {}
    latest: dict[int, float] = {}
    for event in data["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        for name, kind in FIELDS[event["ph"]].items():
            assert isinstance(event[name], kind), (event, name)
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ts"] >= latest.get(event["pid"], 0.0), "events are in order"
        latest[event["pid"]] = event["ts"]
        assert ("process_name", event["pid"], 0) in named
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, NUMBER) for value in event["args"].values())
        else:
            thread = (event["pid"], event["tid"])
            assert ("thread_name", *thread) in named
            assert event["dur"] >= 0
            stack = stacks.setdefault(thread, [])
            while stack and stack[-1] <= event["ts"] + 1e-3:  # nanoseconds are rounded
                stack.pop()
            assert not stack or event["ts"] + event["dur"] <= stack[-1] + 2e-3, "spans of a thread nest"
            stack.append(event["ts"] + event["dur"])


@pytest.mark.parametrize("method", ["card", "sps", "vanilla"])
def test_the_file_of_a_run_is_in_the_chrome_trace_format(method: str) -> None:
    trace, _ = traced(method, num_requests=3)
    file = io.StringIO()
    write_trace(file, {method: trace}, {"commit": "0123"})
    data = json.loads(file.getvalue())
    check_format(data)
    names = {event["args"]["name"] for event in data["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"{method}: {track}" for track in ("target", "drafter", "requests")}
    assert data["otherData"] == {"commit": "0123"}
    assert min(event["ts"] for event in data["traceEvents"]) == 0.0


def test_every_span_mark_and_level_is_in_the_file_in_microseconds() -> None:
    trace = Trace()
    trace.begin(3, arrived_at=10.0, now=10.5)
    trace.target_pass(PREFILL, 10.5, 10.75, {"tokens": 5})
    trace.follow(3, RequestStats(num_new_tokens=1), 4, now=10.75)
    trace.follow(3, RequestStats(num_new_tokens=3, hits=1), 2, now=11.0)
    trace.end(3, now=11.5)
    events = [event for event in chrome_trace({"": trace})["traceEvents"] if event["ph"] != "M"]
    times = {(e["ph"], e["name"]): (e["ts"], e.get("dur")) for e in events if e["cat"] == "requests" and e["ph"] != "C"}
    assert times == {
        ("X", "queued"): (0.0, 500_000.0),
        ("X", "request 3"): (500_000.0, 1_000_000.0),
        ("X", PREFILL): (500_000.0, 250_000.0),
        ("X", "decode"): (750_000.0, 750_000.0),
        ("i", HIT): (1_000_000.0, None),
    }
    assert [(e["ts"], e["args"]["candidates"]) for e in events if e["ph"] == "C"] == [
        (750_000.0, 4),
        (1_000_000.0, 2),
        (1_500_000.0, 0),
    ]
    assert [e["args"] for e in events if e["cat"] == "target"] == [{"tokens": 5}]


def test_traces_in_one_file_have_processes_of_their_own_and_begin_together() -> None:
    first, second = Trace(), Trace()
    first.target_pass(VERIFY, 5.0, 6.0, {})
    second.target_pass(VERIFY, 905.0, 906.0, {})
    data = chrome_trace({"card": first, "sps": second})
    check_format(data)
    passes = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["ts"]) for event in passes] == [(1, 0.0), (4, 0.0)]


@settings(max_examples=30)
@given(data=st.data())
def test_whatever_happens_the_file_is_in_the_format(data: st.DataObject) -> None:
    trace, now = Trace(shares_clock=data.draw(st.booleans())), 0.0
    stats = {i: RequestStats() for i in range(3)}
    acts = st.sampled_from(["begin", "end", "wait", "pass", "sent", "drafter", "layer", "follow"])
    step_end = 0.0
    for act in data.draw(st.lists(acts, max_size=30)):
        now += data.draw(st.floats(0.001, 1.0))
        request_id = data.draw(st.integers(0, 2))
        match act:
            case "begin":
                trace.end(request_id, now)
                trace.begin(request_id, now - data.draw(st.floats(0.0, 0.001)), now)
            case "end":
                trace.end(request_id, now)
            case "wait" | "pass":
                span = (now, now + data.draw(st.floats(0.0, 0.5)))
                trace.wait(*span, takes_turns=data.draw(st.booleans())) if act == "wait" else trace.target_pass(
                    VERIFY, *span, {"tokens": 3}
                )
                now = span[1]
            case "sent":
                trace.sent([Correction(request_id, 1, 0, (1,), False)], now)
            case "drafter":
                trace.drafter_came()
                step_end = now
            case "layer":
                length_s = data.draw(st.floats(0.0, 0.001))
                began_at = max(step_end, now - 0.001)
                step_end = began_at + length_s
                trace.layer(layer(began_at, step_end, request_id=request_id), max(now, step_end))
                now = max(now, step_end)
            case "follow":
                one = stats[request_id]
                one.hits, one.late_hits = one.hits + data.draw(st.integers(0, 2)), one.late_hits + 1
                one.num_new_tokens += 1
                trace.follow(request_id, one, data.draw(st.integers(0, 9)), now)
    check_format(chrome_trace({"x": trace}))


def test_a_full_trace_counts_what_it_drops_and_says_so_in_the_file() -> None:
    trace = Trace(max_events=3)
    for i in range(5):
        trace.target_pass(VERIFY, i, i + 0.5, {})
    trace.layer(layer(1.0, 2.0), now=9.0)
    assert (len(trace.spans), trace.num_dropped) == (3, 3)
    assert chrome_trace({"": trace})["otherData"] == {"dropped events": "3"}


# ---- from outside ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["inline", "thread"])
def test_llm_traces_what_runs_inside_the_block(pair: Pair, placement: str) -> None:
    with LLM(pair.target, pair.draft, placement=placement, dtype="float32", policy="fixed") as llm:
        llm.generate("the cat", GREEDY)
        with llm.trace() as trace:
            (result,) = llm.generate("the cat sat", GREEDY)
        llm.generate("the mat", GREEDY)
    passes = [span for span in spans_of(trace, VERIFY) if span.track == "target"]
    assert len(passes) == result.stats.target_passes
    assert len([span for span in trace.spans if span.name.startswith("request ")]) == 1
    check_format(chrome_trace({"": trace}))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process may have a clock of its own")
def test_a_drafter_in_its_own_process_has_the_clock_of_the_target(pair: Pair) -> None:
    settings = {
        "placement": "process",
        "policy": "fixed",
        "max_wait_s": 60.0,
        "drafter_timeout_s": 90.0,
        "dtype": "float32",
    }
    with LLM(pair.target, pair.draft, **settings) as llm, llm.trace() as trace:
        llm.generate("the cat sat", GREEDY)
    steps = spans_of(trace, STEP)
    (whole,) = (span for span in trace.spans if span.name == "request 0")
    assert steps
    for step in steps:
        assert whole.start_s <= step.start_s < step.end_s <= whole.end_s


def test_async_llm_traces_too(pair: Pair) -> None:
    async def run() -> Trace:
        async with AsyncLLM(pair.target, pair.draft, placement="inline", dtype="float32", policy="fixed") as llm:
            with llm.trace() as trace:
                async for _ in llm.generate("the cat sat", GREEDY):
                    pass
            return trace

    assert spans_of(asyncio.run(run()), VERIFY)


def test_card_generate_writes_a_trace(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    models = ["--target", pair.target, "--draft", pair.draft, "--placement", "inline", "--max-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["card", "generate", *models, "--trace", str(out), "the cat sat"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    capsys.readouterr()
    data = json.loads(out.read_text("utf-8"))
    check_format(data)
    assert data["otherData"]["method"] == "card"
    monkeypatch.setattr(sys, "argv", ["card", "generate", *models, "--trace", str(out / "t.json"), "hi"])
    with pytest.raises(SystemExit) as refused:
        main()
    said = capsys.readouterr().err
    assert refused.value.code == 2
    assert said.startswith("card: error: ")
    assert said.count("\n") == 1
