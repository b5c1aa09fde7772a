"""The gate of the tuned policy: its matrix is complete, its texts are what they claim, its verdict is strict."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import msgspec
import pytest

from card.errors import BenchError
from card.tools.planner.profile import Overheads

SHORT = "int8 90M", "short"


@pytest.fixture
def gate(bench):
    return bench["policy_gate"]


@pytest.fixture
def cells(bench):
    return bench["policy_cells"]


@pytest.fixture
def texts(bench):
    return bench["policy_texts"]


def line(over_best: float, over_plain: float = 1.0, speed: float = 100.0, text: str = "demo") -> dict[str, Any]:
    cell = {"text": text, "price": "int8 90M", "size": "short", "start": "right"}
    return {
        "cell": cell,
        "later_over_best": over_best,
        "later_over_plain": over_plain,
        "tuned": {"later": speed},
        "fixed": {"plain": {"later": 1.0}},
        "overheads": msgspec.to_builtins(Overheads()),
    }


def test_every_pair_of_properties_occurs_in_some_cell(cells, texts):
    chosen = [astuple(cell)[:3] for cell in cells.cells() if cell.start == "right" and cell.price in cells.PRICES]
    axes = ((*texts.RECORDED, *texts.MADE_UP), cells.PRICES, cells.SIZES_OF_RUNS)
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(cell[i], cell[j]) for cell in chosen} == set(itertools.product(axes[i], axes[j]))
    assert {cell.start for cell in cells.cells()} == set(cells.STARTS)
    assert {cell.price for cell in cells.cells()} == {*cells.PRICES, *cells.ON_CORES}


def test_more_cores_never_make_a_pass_slower_and_read_no_more_than_memory_gives(cells):
    few, many = (cells.price_on(num, 50.0, is_dear=True) for num in (8, 16))
    assert all(one >= other for one, other in zip(few.alone, many.alone, strict=True))
    assert few.alone[0] == pytest.approx(1e3 * 1.12 / 50.0, rel=1e-4), "1.12 GB at 50 GB/s"
    assert cells.price_on(4, 200.0, is_dear=True).alone[0] == pytest.approx(1e3 * 1.12 / (4 * 18.0), rel=1e-4)
    assert "beside" in cells.fixed_rows(cells.Cell("code", "8 cores, 50 GB/s, 1.5 B", "4"))


def test_a_drafter_beside_the_target_is_a_fixed_row_where_it_takes_nothing_from_it(cells):
    assert "beside" in cells.fixed_rows(cells.Cell("demo", "many cores", "long"))
    rows = cells.fixed_rows(cells.Cell("demo", "int8 90M", "long"))
    assert "beside" not in rows
    assert {row[1].get("num_speculative_tokens") for row in rows.values()} >= {1, 2, 3, 4, 5, 6, 7, 10}


@pytest.mark.parametrize("name", ["poor draft", "adversarial draft", "flat claims"])
def test_a_made_up_draft_is_right_as_often_as_it_should_be(texts, name):
    draft = texts.MADE_UP[name]
    recording = texts.make_recording(draft)
    assert recording.agreement() == pytest.approx(draft.agreement, abs=0.03)
    assert recording == texts.make_recording(draft), "texts are seeded"


def test_recorded_texts_are_those_of_the_demo_pair(texts):
    for name in texts.RECORDED:
        recording = texts.recording_of(name)
        assert (recording.target, recording.draft) == ("demo-target", "demo-draft")
        assert recording.temperature == (1.0 if name == texts.SAMPLED else 0.0)
        assert 0.75 < recording.agreement() < 0.97
        assert recording.num_tokens > 300


def test_a_run_takes_the_same_virtual_time_whenever_it_is_made(cells):
    cell, overheads = cells.Cell("demo", *SHORT), Overheads()
    assert cells.run_row(cell, overheads, "card", {}) == cells.run_row(cell, overheads, "card", {})


def test_requests_that_run_at_once_share_no_prompt(cells, texts, monkeypatch):
    for kind in ("copy-edit", "poor draft"):
        recording, distinct = texts.recording_of(kind), texts.distinct_recording(kind)
        assert len({text.prompt_ids[0] for text in distinct.texts}) == texts.NUM_DISTINCT
        for idx, text in enumerate(distinct.texts):
            same = recording.texts[idx % len(recording.texts)]
            assert (text.prompt_ids[1:], text.token_ids) == (same.prompt_ids, same.token_ids)
    stages = watch_stages(cells, monkeypatch)
    monkeypatch.setitem(cells.SIZES_OF_RUNS, "4", cells.Size(4, 700))
    cells.run_row(cells.Cell("copy-edit", "int8 90M", "4"), Overheads(), "vanilla", {})
    assert [stage.engine.stats().prefix_reused_tokens for stage in stages] == [0]


def test_a_run_that_ends_behind_a_prompt_is_as_fast_as_one_that_ends_before_it(cells, monkeypatch):
    speeds = []
    for tokens in (4 * 128, 4 * 129):  # answers have 128
        monkeypatch.setitem(cells.SIZES_OF_RUNS, "4", cells.Size(4, tokens))
        speeds.append(cells.run_row(cells.Cell("poor draft", "Q4_0 90M", "4"), Overheads(), "vanilla", {}).later)
    assert speeds[1] == pytest.approx(speeds[0], rel=0.05), "four prompts of 64 tokens are 0.088 s, four rounds 0.014 s"


def watch_stages(cells: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that all stages built from now on are added to."""
    built: list[Any] = []

    def build_stage(*args: Any) -> Any:
        built.append(BUILD(*args))
        return built[-1]

    BUILD: Callable[..., Any] = cells.build_stage
    monkeypatch.setattr(cells, "build_stage", build_stage)
    return built


def test_each_engine_of_a_short_run_begins_anew_and_its_first_tokens_are_no_later_ones(cells, monkeypatch):
    built = watch_stages(cells, monkeypatch)
    monkeypatch.setitem(cells.SIZES_OF_RUNS, "short", cells.Size(1, 60, engines=3))
    speed = cells.run_row(cells.Cell("late draft", *SHORT), Overheads(), "vanilla", {})
    assert len(built) == 3
    assert [stage.engine.stats().rounds for stage in built] == [60, 60, 60]
    seconds = sum(stage.clock() for stage in built)
    assert speed.whole == pytest.approx(180 / seconds, rel=1e-4)
    assert speed.later > speed.whole, "the first tokens' seconds hold the reading of a prompt"


def test_more_python_around_rounds_makes_plain_decoding_slower_by_just_that(cells):
    cell = cells.Cell("demo", *SHORT)
    fast, slow = (cells.run_row(cell, Overheads(round_s=seconds), "vanilla", {}) for seconds in (0.0, 1e-3))
    assert 1 / slow.later - 1 / fast.later == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize("start", ["right", "dear drafting"])
def test_the_tuned_policy_takes_a_good_draft_model_back_that_began_badly_where_costs_are_measured_wrongly(cells, start):
    cell, overheads = cells.Cell("late draft", "Q4_0 AVX2 90M", "long", start), Overheads()
    plain, tuned = (cells.run_row(cell, overheads, method, {}) for method in ("vanilla", "card"))
    assert tuned.later > 1.3 * plain.later


def test_the_verdict_names_each_rule_that_is_broken(gate):
    good = [line(0.99, speed=106.0), line(0.98, text="code", speed=106.0)]
    others = [line(0.9), line(0.9, text="code")]
    assert gate.verdict(good, []) == []
    assert gate.verdict(good, others) == []
    (mean,) = gate.verdict([line(1.0, speed=104.0)], others)
    assert "1.040 times that of the other policy" in mean
    (behind,) = gate.verdict([*good, line(0.97, text="questions")], [])
    assert "1 of 3 cells are below 0.98 of the best fixed row, the worst at 0.970: questions, int8 90M" in behind
    (slower,) = gate.verdict([line(1.0, over_plain=0.97)], [])
    assert "of plain decoding" in slower
    with pytest.raises(BenchError, match="no cell in common"):
        gate.verdict(good, [line(1.0, text="copy-edit")])


def test_known_fixed_rows_count_only_if_the_same_was_charged_to_them(gate, cells):
    found = gate.known_fixed([line(1.0)], Overheads(tuned_s=1.0))
    assert list(found) == [cells.Cell("demo", *SHORT)], "what tuned policies are charged is none of theirs"
    assert gate.known_fixed([line(1.0)], Overheads(request_s=1.0)) == {}


def test_the_gate_charges_what_was_measured_last(gate, tmp_path):
    path = tmp_path / "round_overheads.jsonl"
    with pytest.raises(BenchError, match="round_overheads"):
        gate.measured_overheads(path)
    path.write_text("".join(json.dumps({"overheads": {"round_s": seconds}}) + "\n" for seconds in (1e-3, 2e-3)))
    assert gate.measured_overheads(path).round_s == 2e-3


def test_a_day_begins_and_ends_with_the_same_copies(bench) -> None:
    day, script = bench["day_texts"].make_day(0), bench["day"]
    first, last = (
        [day.recording.texts[idx] for idx in episode.texts] for episode in (day.episodes[0], day.episodes[-1])
    )
    assert [text.token_ids for text in first] == [text.token_ids for text in last]
    assert not {text.prompt_ids for text in first} & {text.prompt_ids for text in last}, "no prompt is kept"
    spent = [script.Spent(num_tokens=100, seconds=seconds) for seconds in (2.0, 1.0, 4.0)]
    assert script.last_over_first(spent) == 0.5
