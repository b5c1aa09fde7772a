"""`card report`: a page that needs nothing else, plots to scale, a table that says the same, and refusals."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import card
from card.tools.bench.records import Run
from card.tools.bench.report.charts import charts_of
from card.tools.bench.report.page import render
from card.tools.bench.report.table import write_csv
from card.tools.bench.results import load
from card.tools.bench.summary import Spread, summarise
from tests.commands import Ran, run_command
from tests.tools.bench.bench_files import BASELINE, ROWS, make_run, write_run

LONG_NAME = "card,beam_width=8,budget=32,verify=tree,growth=best-first,all-cores"
NEEDS_MORE = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `card report` inside this process."""

    def run_here(*args: object) -> Ran:
        return run_command(capsys, "report", *map(str, args))

    return run_here


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = (*ROWS, (LONG_NAME, "card", 61.0, 3.0, 180.0), ("transformers", "assisted", 20.0, 2.0, 0.0))
    return write_run(tmp_path_factory.mktemp("bench") / "r.jsonl", make_run(rows=rows, workloads=("gsm8k", "chat")))


@pytest.fixture(scope="module")
def page(results: Path) -> str:
    return render([(one, summarise(one)) for one in load(results)])


def load_one(path: Path) -> Run:
    (found,) = load(path)
    return found


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in NEEDS_MORE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_needs_no_network_and_no_script(page: str) -> None:
    parsed = Page(page)
    assert not parsed.open
    for tag, attrs in parsed.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base"}
        for name, value in attrs.items():
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                assert value is not None
                assert value.startswith("#"), f"<{tag} {name}={value}>"
    assert "@import" not in page
    assert "url(" not in page


def test_every_plot_says_its_figures_beside_its_bars(page: str, results: Path) -> None:
    plots = [" ".join(Page(plot).text) for plot in re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)]
    assert len(plots) == 2 * 8
    assert page.count('class="lane"') == page.count('class="lane" aria-hidden="true"')
    speedups = [" ".join(plot.split()) for plot in plots if f"Speed-up over {BASELINE}" in plot]
    for workload, plot in zip(("gsm8k", "chat"), speedups, strict=True):
        for row in summarise(load_one(results)):
            if row.row != BASELINE and row.workload == workload:
                assert row.speedup is not None
                assert f"{row.row} {row.speedup.median:.2f}×" in plot


def test_losses_are_printed_and_have_a_colour_of_their_own(page: str) -> None:
    parsed = Page(page)
    losses = [attrs for _, attrs in parsed.tags if attrs.get("class") == "loss"]
    assert len(losses) == 2 * (2 + 2), "two rows are slower on two workloads: cells of the overview, and rows"
    assert page.count('class="words loss"') == 2 * 2, "and in the plots"
    said = " ".join(parsed.text)
    assert f"Slower than {BASELINE}: lookahead, transformers." in said
    assert re.search(r"0\.\d\d× \(0\.\d\d–0\.\d\d\) slower", said)


def test_the_page_says_how_it_was_measured(page: str) -> None:
    said = " ".join(Page(page).text)
    for fact in (
        "card bench --pair demo --out results.jsonl <&>",
        "0123456789abcdef",
        "Some CPU",
        "load average 0.1",
        "float32",
        "Inflated target: it costs 90M (inflated from 3.1M, same outputs).",
        "torch 2.8",
        "temperature 0, top-k 0",
        "computed with other numbers, so that the text is another one: transformers",
    ):
        assert fact in said, fact


def test_the_same_results_make_the_same_page(results: Path, page: str) -> None:
    assert render([(one, summarise(one)) for one in load(results)]) == page


def test_tables_scroll_in_boxes_of_their_own(page: str) -> None:
    parsed = Page(page)
    tables = [i for i, (tag, _) in enumerate(parsed.tags) if tag == "table"]
    assert len(tables) == 3
    for i in tables:
        assert parsed.tags[i - 1][1].get("class") == "box"
    assert re.search(r"\.box \{[^}]*overflow-x: auto", page)


# ---- plots ----------------------------------------------------------------------------------------------------------


def test_speed_ups_are_bars_of_their_medians_the_fastest_first_and_losses_in_another_colour(results: Path) -> None:
    rows = [row for row in summarise(load_one(results)) if row.workload == "gsm8k"]
    chart = charts_of(rows, BASELINE)[0]
    wanted = sorted((row.speedup.median for row in rows if row.speedup and row.row != BASELINE), reverse=True)
    bars = [line.lanes[0][0] for line in chart.lines]
    assert [bar.end for bar in bars] == wanted
    assert [bar.colour for bar in bars] == ["gain" if one >= 1 else "loss" for one in wanted]
    assert {bar.colour for bar in bars} == {"gain", "loss"}
    assert chart.reference == 1.0


def test_bars_are_drawn_to_one_scale(page: str, results: Path) -> None:
    rows = [row for row in summarise(load_one(results)) if row.workload == "gsm8k"]
    chart = charts_of(rows, BASELINE)[0]
    plot = re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)[0]
    widths = [float(width) for width in re.findall(r'class="bar" .*?width: ([\d.]+)%', plot)]
    wanted = [100 * line.lanes[0][0].end / chart.most for line in chart.lines]
    assert widths == pytest.approx(wanted, abs=0.01)
    assert chart.most == max(row.speedup.most for row in rows if row.speedup)
    assert set(re.findall(r"--muted\); left: ([\d.]+)%", plot)) == {f"{100 / chart.most:.2f}"}


def test_what_there_is_nothing_to_say_of_is_no_plot() -> None:
    run = make_run(rows=ROWS[:1])
    charts = charts_of(summarise(run), BASELINE)
    assert [chart.title for chart in charts] == ["Time to first token", "Time between tokens", "Passes for all samples"]
    assert "Speed-up over" not in render([(run, summarise(run))])


def test_two_runs_of_one_pair_have_sections_of_their_own() -> None:
    first, second = make_run(), make_run(run_id="run-2")
    page = render([(run, summarise(run)) for run in (first, second)])
    assert page.count("How it was measured: run run-") == 2
    for run_id in ("run-1", "run-2"):
        assert page.count(f"<h2>demo-90M, gsm8k, run {run_id}</h2>") == 1


def test_an_interrupted_run_is_said_to_be_one() -> None:
    whole = make_run()
    cut = replace(whole, status="interrupted")
    assert "Run run-1 was interrupted" in " ".join(Page(render([(cut, summarise(cut))])).text)
    assert "interrupted" not in render([(whole, summarise(whole))])


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_csv_has_a_line_for_each_pair_row_and_workload_with_the_figures_of_the_summary() -> None:
    made = make_run(pairs=("a", "b"), workloads=("gsm8k", "chat"))
    file = io.StringIO()
    write_csv(file, [(made, summarise(made))])
    lines = list(csv.DictReader(io.StringIO(file.getvalue())))
    keys = [(line["pair"], line["workload"], line["row"]) for line in lines]
    assert len(set(keys)) == len(keys) == 2 * 2 * len(ROWS)
    for line, row in zip(lines, summarise(made), strict=True):
        assert (line["pair"], line["workload"], line["row"]) == (row.pair, row.workload, row.row)
        assert float(line["tokens_per_s_median"]) == row.tokens_per_s.median
        assert row.first_token is not None
        assert float(line["first_token_p99_s"]) == row.first_token.p99
        assert line["target_cost"].startswith("90M (inflated")
        assert (line["run_id"], line["commit"], line["dtype"]) == ("run-1", "0123456789abcdef", "float32")
        depths = row.costs.acceptance_per_depth
        assert line["acceptance_per_depth"].split() == [str(share) for share in depths or ()]
        assert line["drafter_passes"] == ("" if row.costs.drafter_passes is None else str(row.costs.drafter_passes))


# ---- the command ----------------------------------------------------------------------------------------------------


def assert_one_line(ran: Ran, said: str) -> None:
    assert ran.status == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("card: error: ")
    assert ran.err.count("\n") == 1, ran.err
    assert said in ran.err


def test_the_command_writes_page_and_table(results: Path, tmp_path: Path, run: Callable[..., Ran], page: str) -> None:
    out, table = tmp_path / "new" / "report.html", tmp_path / "r.csv"
    ran = run(results, "--out", out, "--csv", table)
    assert (ran.status, ran.out) == (0, ""), ran
    assert ran.err.splitlines() == [f"wrote {path}" for path in (table, out)]
    assert out.read_text("utf-8") == page
    assert page.count("demo-90M, gsm8k</h2>") == 1
    assert len(table.read_text("utf-8").splitlines()) == 1 + 2 * 6


def test_without_a_page_the_command_prints_what_the_run_printed(results: Path, run: Callable[..., Ran]) -> None:
    ran = run(results)
    assert (ran.status, ran.err) == (0, "")
    assert "tokens/s" in ran.out and BASELINE in ran.out and "gsm8k: prompts:" in ran.out


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def incomplete(lines: list[dict[str, Any]]) -> None:
    del lines[-10]


def doubled(lines: list[dict[str, Any]]) -> None:
    lines.insert(4, lines[3])


def swapped(lines: list[dict[str, Any]]) -> None:
    lines[3], lines[4] = lines[4], lines[3]


def other_text(lines: list[dict[str, Any]]) -> None:
    victim = next(line for line in lines if line["kind"] == "sample" and line["row"] == "card")
    victim["token_ids"][5] += 1


def unchecked(lines: list[dict[str, Any]]) -> None:
    lines[:] = [line for line in lines if line["kind"] != "check"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (incomplete, "missing"),
        (doubled, "doubled"),
        (swapped, "out of its place"),
        (other_text, f"differs from {BASELINE} at token 5"),
        (unchecked, "texts were not compared"),
    ],
)
def test_results_that_must_not_be_shown_are_one_line_and_write_nothing(
    spoil: Callable[[list[dict[str, Any]]], None],
    said: str,
    results: Path,
    tmp_path: Path,
    run: Callable[..., Ran],
) -> None:
    lines = lines_of(results)
    if spoil is incomplete:
        lines = [line for line in lines if line["kind"] != "check"]
    spoil(lines)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    ran = run(broken, "--out", tmp_path / "report.html", "--csv", tmp_path / "r.csv")
    assert_one_line(ran, said)
    assert "broken.jsonl, line " in ran.err
    assert sorted(tmp_path.iterdir()) == [broken]


def test_a_place_that_cannot_be_written_is_one_line(results: Path, tmp_path: Path, run: Callable[..., Ran]) -> None:
    (tmp_path / "file").write_text("")
    assert_one_line(run(results, "--csv", tmp_path / "file" / "r.csv"), "cannot be written")


def test_a_speed_up_is_told_with_its_range_and_that_it_is_none(results: Path) -> None:
    row = next(row for row in summarise(load_one(results)) if row.row == "card")
    (line,) = charts_of([replace(row, speedup=Spread.of([0.9, 0.8, 1.1]))], BASELINE)[0].lines
    assert (line.name, line.words, line.is_loss) == ("card", "0.90× (0.80–1.10) slower", True)


@pytest.mark.timeout(240)
def test_the_program_of_the_page_writes_a_trace_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(card.__file__).parent / "tools" / "bench" / "README.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    models = '"demo-target", "demo-draft"'
    assert models in program
    program = program.replace(models, f'{models}, placement="inline", policy="fixed"')  # the default may find that
    exec(compile(program, str(page), "exec"), {})  # drafts do not pay while other tests run
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]}
    assert {"candidates of request 0", "decode"} <= names
