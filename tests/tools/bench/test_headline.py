"""The first sentences of a report: who was fastest, by how much over plain decoding, and where that was lost."""

from __future__ import annotations

from dataclasses import replace

from card.tools.bench.records import Run
from card.tools.bench.report.headline import headlines
from card.tools.bench.report.page import render
from card.tools.bench.summary import RowSummary, Spread, summarise
from tests.tools.bench.bench_files import BASELINE, make_run

NAMES = ("card", "suffix", "sps")


def told(*places: tuple[str, dict[str, tuple[float, float, float]]], **changes: object) -> str:
    """Return what is said of rows with these speed-ups (median, least, most) on workloads."""
    names = tuple(dict.fromkeys(name for _, speeds in places for name in speeds))
    rows = ((BASELINE, "vanilla", 30.0, 1.0, 0.0), *((name, "card", 60.0, 2.0, 100.0) for name in names))
    run = make_run(rows=rows, workloads=tuple(workload for workload, _ in places))
    run = replace(run, rows=tuple(replace(row, **changes.get(row.name, {})) for row in run.rows))  # type: ignore[arg-type]
    speeds_of = dict(places)
    (sentences,) = headlines(run, [_with(row, speeds_of) for row in summarise(run)])
    return " ".join(sentences)


def _with(row: RowSummary, speeds_of: dict[str, dict[str, tuple[float, float, float]]]) -> RowSummary:
    found = speeds_of[row.workload].get(row.row)
    return replace(row, speedup=Spread(*found, runs=()) if found else None)


def test_one_workload_is_told_with_the_range_of_its_repeats() -> None:
    said = told(("gsm8k", {"card": (2.0, 1.9, 2.2), "sps": (1.5, 1.4, 1.6)}))
    assert said == (
        f"With demo-90M, card was the fastest of 2 methods on gsm8k: 2.00× the speed of plain decoding, {BASELINE} "
        f"(its repeats from 1.90× to 2.20×). No method was slower than {BASELINE} anywhere."
    )


def test_the_fastest_over_all_workloads_is_told_with_each_place_where_it_lost() -> None:
    said = told(
        ("gsm8k", {"card": (2.0, 1.9, 2.1), "suffix": (1.0, 1.0, 1.0), "sps": (1.9, 1.8, 2.0)}),
        ("copy", {"card": (4.0, 3.9, 4.4), "suffix": (6.0, 5.0, 7.0), "sps": (0.97, 0.9, 0.99)}),
        ("code", {"card": (2.0, 1.9, 2.1), "suffix": (0.5, 0.4, 0.6), "sps": (2.05, 2.0, 2.2)}),
    )
    assert said == (
        "With demo-90M, card was the fastest of 3 methods over 3 workloads: 2.52× the speed of plain decoding, "
        f"{BASELINE} (geometric mean, from 2.00× on gsm8k to 4.00× on copy). Others were faster than card on copy "
        "(suffix 6.00×, it 4.00×) and on code (sps 2.05×, it 2.00×, within the scatter of the repeats). "
        f"Slower than {BASELINE}: suffix on code (0.50×); sps on copy (0.97×)."
    )


def test_the_verdict_says_that_the_machine_was_busy_and_nothing_of_a_quiet_one() -> None:
    run = make_run()
    busy = replace(run, machine={**run.machine, "load_average": 9.1})
    (said,), (quiet,) = (headlines(one, summarise(one)) for one in (busy, run))
    assert said[1] == "The machine was busy before the run (load 9.1 on 2 cores), so others may have slowed any row."
    assert [*said[:1], *said[2:]] == quiet
    assert said[1] in render([(busy, summarise(busy))])


def test_where_everything_lost_the_headline_says_so() -> None:
    said = told(
        ("gsm8k", {"card": (0.9, 0.8, 1.05), "sps": (0.5, 0.4, 0.6)}),
        ("chat", {"card": (0.8, 0.7, 1.0), "sps": (0.6, 0.5, 0.7)}),
    )
    assert said == (
        f"With demo-90M, nothing was faster than plain decoding, {BASELINE}, over 2 workloads: card came to 0.85× "
        f"(geometric mean, from 0.80× on chat to 0.90× on gsm8k). Slower than {BASELINE}: card everywhere (0.80 to "
        "0.90×, within the scatter of the repeats); sps everywhere (0.50 to 0.60×)."
    )


def test_a_method_that_may_write_another_text_wins_nothing_but_is_told_of() -> None:
    speeds = {"card": (2.0, 1.9, 2.2), "loose": (3.0, 2.9, 3.1)}
    said = told(("gsm8k", speeds), loose={"is_exact": False})
    assert "card was the fastest exact one of 2 methods" in said
    assert "Others were faster than card on gsm8k (loose 3.00×, not exact, it 2.00×)." in said


def test_a_method_that_did_not_run_everywhere_is_compared_where_it_did() -> None:
    said = told(
        ("gsm8k", {"card": (2.0, 1.9, 2.2), "sps": (9.0, 9.0, 9.0)}),
        ("chat", {"card": (2.0, 1.9, 2.2)}),
    )
    assert "card was the fastest of 2 methods over 2 workloads" in said
    assert "Others were faster than card on gsm8k (sps 9.00×, it 2.00×)." in said


def test_one_method_alone_was_the_fastest_of_nothing() -> None:
    assert told(("gsm8k", {"card": (2.0, 1.9, 2.2)})).startswith("With demo-90M, card ran on gsm8k: 2.00× the speed of")


def test_the_page_begins_with_what_came_out_for_each_pair_and_run() -> None:
    runs = [make_run(pairs=("one", "two")), make_run(run_id="run-2")]
    summaries = [(run, summarise(run)) for run in runs]
    page = render(summaries)
    said = [sentences[0] for run, rows in summaries for sentences in headlines(run, rows)]
    assert [one.partition(",")[0] for one in said] == ["With one", "With two", "With demo-90M"]
    places = [page.index(f"<strong>{one}</strong>") for one in said]
    assert page.index("<h1>") < places[0] < places[1] < places[2] < page.index("<h2>")
    assert page.count("Run run-2:</span> <strong>With demo-90M") == 1
    assert _plain(make_run()) == []


def _plain(run: Run) -> list[list[str]]:
    """Return the headlines of a run that holds nothing beside plain decoding."""
    return list(headlines(run, [row for row in summarise(run) if row.row == BASELINE]))
