"""`card report`: a page that needs nothing else, plots that can be read, a table that says the same, and refusals."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card.bench.records import Run
from card.bench.report.charts import charts_of, speedups
from card.bench.report.page import draw_timelines, render, sections_of
from card.bench.report.style import COLOURS, GAIN, LOSS, WIDTH_PT, Chart, Key, as_svg, blank, write_png
from card.bench.report.table import write_csv
from card.bench.report.timeline import draw_timeline, in_words, read_timelines
from card.bench.results import load
from card.bench.summary import Spread, summarise
from card.cli import main
from card.workers.metrics import RequestStats
from card.workers.trace import VERIFY, Trace, write_trace
from tests.bench.bench_files import BASELINE, ROWS, make_run, write_run

if TYPE_CHECKING:
    from matplotlib.text import Text

pytest.importorskip("matplotlib")

PHONE_PX = 343  # inside the margins of a screen of 375
LONG_NAME = "card,beam_width=8,budget=32,verify=tree,growth=best-first,all-cores"
NEEDS_MORE = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta"}


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of the command gave."""

    status: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `card report` inside this process."""

    def run_here(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["card", "report", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run_here


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = (*ROWS, (LONG_NAME, "card", 61.0, 3.0, 180.0), ("transformers", "assisted", 20.0, 2.0, 0.0))
    return write_run(tmp_path_factory.mktemp("bench") / "r.jsonl", make_run(rows=rows, workloads=("gsm8k", "chat")))


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with path.open("w", encoding="utf-8") as file:
        write_trace(file, {"card": worked_trace()})
    return path


@pytest.fixture(scope="module")
def page(results: Path, trace_file: Path) -> str:
    summaries = [(one, summarise(one)) for one in [load_one(results)]]
    return render(summaries, sections_of(summaries), draw_timelines(read_timelines(trace_file)))


def load_one(path: Path) -> Run:
    (found,) = load(path)
    return found


def worked_trace() -> Trace:
    """Return 4 rounds of 100 ms in 500 ms: the target waits 25 ms twice, the drafter never computes."""
    trace, stats = Trace(), RequestStats()
    trace.begin(7, 9.0, 9.5)
    trace.target_pass("prefill", 9.5, 10.0, {})
    stats.num_new_tokens = 1
    trace.follow(7, stats, 3, 10.0)
    for i, at_s in enumerate((10.0, 10.15, 10.25, 10.4)):
        trace.target_pass(VERIFY, at_s, at_s + 0.1, {})
        stats.hits += i != 3
        stats.misses += i == 3
        trace.follow(7, stats, 2 + i, at_s + 0.1)
    for at_s in (10.1, 10.375):
        trace.wait(at_s, at_s + 0.025, takes_turns=False)
    trace.end(7, 10.6)
    return trace


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
    assert all(address in ("#" + match for match in re.findall(r'id="([^"]+)"', page)) for address in urls(page))


def urls(page: str) -> list[str]:
    return re.findall(r"url\(([^)]+)\)", page)


def test_ids_are_unique_so_that_no_plot_takes_parts_of_another(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {reference[1:] for reference in re.findall(r'href="(#[^"]+)"', page)} <= set(ids)


def test_every_plot_has_a_text_alternative_with_its_figures(page: str, results: Path) -> None:
    labels = [attrs["aria-label"] or "" for tag, attrs in Page(page).tags if tag == "svg"]
    assert len(labels) == page.count('role="img"') == 2 * 8 + 1
    loaded = load_one(results)
    for row in summarise(loaded):
        if row.row != BASELINE:
            (speedup,) = (one for one in labels if one.startswith("Speed-up") and row.workload in one)
            assert row.speedup is not None
            assert f"{row.row} {row.speedup.median:.2f}×" in speedup


def test_plots_take_their_colours_from_the_page_so_that_dark_mode_recolours_them(page: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert svgs
    for svg in svgs:
        assert not re.findall(r"#[0-9a-fA-F]{6}\b|\b(?:fill|stroke): (?:black|white)", svg)
    assert "prefers-color-scheme: dark" in page
    for name, (light, dark) in COLOURS.items():
        assert f"--{name}: {light};" in page
        assert f"--{name}: {dark};" in page


def test_text_in_plots_is_14_pixels_or_more_on_a_phone(page: str) -> None:
    widths = [float(width) for width in re.findall(r'viewBox="0 0 (\S+) ', page)]
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\d{3} )?([\d.]+)px", page)]
    assert set(widths) == {WIDTH_PT}
    assert sizes
    assert min(sizes) * PHONE_PX / WIDTH_PT >= 14


def test_losses_are_printed_and_have_a_colour_of_their_own(page: str) -> None:
    parsed = Page(page)
    losses = [attrs for _, attrs in parsed.tags if attrs.get("class") == "loss"]
    assert len(losses) == 2 * (2 + 2), "two rows are slower on two workloads: cells of the overview, and rows"
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


def test_the_same_results_make_the_same_page(results: Path, page: str, trace_file: Path) -> None:
    summaries = [(one, summarise(one)) for one in [load_one(results)]]
    again = render(summaries, sections_of(summaries), draw_timelines(read_timelines(trace_file)))
    assert again == page


def test_tables_scroll_in_boxes_of_their_own(page: str) -> None:
    parsed = Page(page)
    tables = [i for i, (tag, _) in enumerate(parsed.tags) if tag == "table"]
    assert len(tables) == 3
    for i in tables:
        assert parsed.tags[i - 1][1].get("class") == "box"
    assert re.search(r"\.box \{[^}]*overflow-x: auto", page)


# ---- plots ----------------------------------------------------------------------------------------------------------


def texts_of(chart: Chart) -> list[tuple[Text, Any]]:
    """Return the texts of a plot that are seen, with the boxes that they take."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer = FigureCanvasAgg(chart.figure).get_renderer()
    chart.figure.draw(renderer)
    shown = [text for text in chart.figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text, text.get_window_extent(renderer)) for text in shown]
    return [(text, box) for text, box in boxes if box.width and not _is_hidden_tick(text, chart)]


def _is_hidden_tick(text: Text, chart: Chart) -> bool:
    """Return whether a text is the label of a tick outside the axes, which is never drawn."""
    (axes,) = chart.figure.axes
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        for tick in axis.get_major_ticks():
            if text in (tick.label1, tick.label2):
                is_inside = min(limits) - 1e-9 <= tick.get_loc() <= max(limits) + 1e-9
                return not (is_inside and text is tick.label1)
    return False


def assert_legible(chart: Chart) -> None:
    figure = chart.figure.bbox
    texts = texts_of(chart)
    for text, box in texts:
        where = f"{chart.name}: {text.get_text()!r}"
        assert figure.x0 - 1 <= box.x0, where
        assert box.x1 <= figure.x1 + 1, where
        assert figure.y0 - 1 <= box.y0, where
        assert box.y1 <= figure.y1 + 1, where
    for (one, its), (other, others) in combinations(texts, 2):
        across = min(its.x1, others.x1) - max(its.x0, others.x0)
        down = min(its.y1, others.y1) - max(its.y0, others.y0)
        assert across < 1 or down < 3, f"{chart.name}: {one.get_text()!r} lies over {other.get_text()!r}"


def test_no_text_of_any_plot_is_clipped_or_lies_over_another(results: Path, trace_file: Path) -> None:
    loaded = load_one(results)
    rows = [row for row in summarise(loaded) if row.workload == "gsm8k"]
    charts = charts_of(rows, "a-pair-with-a-long-name, a-long-workload", BASELINE)
    charts += [draw_timeline(timeline) for timeline in read_timelines(trace_file)]
    assert {chart.name.partition("-a-pair")[0] for chart in charts} == {
        "speedup",
        "ceiling",
        "acceptance",
        "first-token",
        "inter-token",
        "candidates",
        "hits",
        "passes",
        "timeline-card",
    }
    for chart in charts:
        assert_legible(chart)
        (axes,) = chart.figure.axes
        assert axes.get_xlabel(), "the axis has its unit"


@settings(max_examples=15)
@given(
    title=st.text("abcMW-$_^ :", min_size=1, max_size=90),
    label=st.text("abcMW-$ ", min_size=1, max_size=60),
    x_label=st.text("abcMW ", min_size=1, max_size=60),
)
def test_titles_and_keys_of_any_length_stay_inside_and_apart(title: str, label: str, x_label: str) -> None:
    figure, axes = blank(title, 100.0, x_label=x_label, y_label="tokens", keys=[Key(label, GAIN), Key("b", LOSS)])
    axes.set_yticks([])
    assert_legible(Chart("x", title, "", "", figure))


def test_speed_ups_are_bars_of_their_medians_the_fastest_first_and_losses_in_another_colour(results: Path) -> None:
    from matplotlib.colors import to_hex

    rows = [row for row in summarise(load_one(results)) if row.workload == "gsm8k"]
    (chart,) = speedups(rows, "x", BASELINE)
    wanted = sorted((row.speedup.median for row in rows if row.speedup and row.row != BASELINE), reverse=True)
    bars = [bar for bar in chart.figure.axes[0].patches if hasattr(bar, "get_width")]
    assert [bar.get_width() for bar in bars] == pytest.approx(wanted)
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [GAIN if one >= 1 else LOSS for one in wanted]
    assert GAIN in map(to_hex, (bar.get_facecolor() for bar in bars))
    assert LOSS in map(to_hex, (bar.get_facecolor() for bar in bars))


def test_a_picture_says_what_its_plot_is_of_and_the_plot_in_the_page_does_not(tmp_path: Path) -> None:
    from matplotlib.text import Text

    rows = [row for row in summarise(make_run()) if row.workload == "gsm8k"]
    drawn: list[str] = []
    (chart,) = speedups(rows, "a pair, gsm8k", BASELINE)
    alone = replace(chart, where="")
    plain, told = tmp_path / "plain.png", tmp_path / "told.png"
    write_png(alone, plain)
    savefig = chart.figure.savefig

    def noting(*args: Any, **options: Any) -> None:
        drawn.extend(text.get_text() for text in chart.figure.findobj(Text))
        savefig(*args, **options)

    chart.figure.savefig = noting  # type: ignore[method-assign]
    write_png(chart, told)
    assert "a pair, gsm8k" in drawn
    assert "a pair" not in " ".join(text.get_text() for text in chart.figure.findobj(Text)), "nor does what comes next"
    (width, height), (same_width, more_height) = map(png_size, (plain, told))
    assert width == same_width
    assert height < more_height
    assert 'aria-label="Speed-up over' in as_svg(chart, "p-")
    assert "a pair, gsm8k:" in as_svg(chart, "p-")


def png_size(path: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def test_what_there_is_nothing_to_say_of_is_no_plot() -> None:
    run = make_run(rows=ROWS[:1])
    charts = charts_of(summarise(run), "x", BASELINE)
    assert [chart.name for chart in charts] == ["first-token-x", "inter-token-x", "passes-x"]
    summaries = [(run, summarise(run))]
    assert "Speed-up over" not in render(summaries, sections_of(summaries), [])


def test_two_runs_of_one_pair_have_sections_of_their_own() -> None:
    first, second = make_run(), make_run(run_id="run-2")
    summaries = [(run, summarise(run)) for run in (first, second)]
    sections = sections_of(summaries)
    names = [chart.name for section in sections for chart in section.charts]
    assert len(set(names)) == len(names), "their pictures are different files"
    page = render(summaries, sections, [])
    assert page.count("How it was measured: run run-") == 2


def test_an_interrupted_run_is_said_to_be_one() -> None:
    whole = make_run()
    cut = replace(whole, status="interrupted")
    summaries = [(cut, summarise(cut))]
    assert "Run run-1 was interrupted" in " ".join(Page(render(summaries, sections_of(summaries), [])).text)
    summaries = [(whole, summarise(whole))]
    assert "interrupted" not in render(summaries, sections_of(summaries), [])


# ---- the timeline ---------------------------------------------------------------------------------------------------


def test_the_timeline_says_what_share_of_the_time_each_side_worked(trace_file: Path) -> None:
    (timeline,) = read_timelines(trace_file)
    assert timeline.label == "card"
    assert in_words(timeline) == (
        "4 rounds in 500 ms: the target computes 80% of the time, waits 10% and leaves 0% to the drafter, which "
        "computes 0%; hits 3, late hits 0, misses 1."
    )


def test_the_timeline_draws_each_pass_and_mark_where_it_was(trace_file: Path) -> None:
    from matplotlib.colors import to_hex

    (timeline,) = read_timelines(trace_file)
    axes = draw_timeline(timeline).figure.axes[0]
    bars = [bar for bar in axes.patches if hasattr(bar, "get_width")]
    passes = sorted(bar.get_x() for bar in bars if to_hex(bar.get_facecolor()) == GAIN)
    assert passes == pytest.approx([0.0, 150.0, 250.0, 400.0])
    waits = sorted((bar.get_x(), bar.get_width()) for bar in bars if to_hex(bar.get_facecolor()) == LOSS)
    assert waits == [pytest.approx((100.0, 25.0)), pytest.approx((375.0, 25.0))]
    marks = sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() in ("^", "X"))
    assert marks == pytest.approx([100.0, 250.0, 350.0, 500.0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no trace of card"),
        ("[]", "is no trace of card"),
        ("{}", "is no trace of card (KeyError: 'traceEvents')"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "ts": 0}]}', "holds no target pass of card"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "cat": "target", "pid": 1, "ts": 0}]}', "is no trace of card"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(
    text: str, said: str, tmp_path: Path, results: Path, run: Callable[..., Ran]
) -> None:
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8")
    ran = run(results, "--csv", tmp_path / "x.csv", "--trace", path)
    assert_one_line(ran, said)


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


def test_the_command_writes_page_pictures_and_table(
    results: Path, trace_file: Path, tmp_path: Path, run: Callable[..., Ran], page: str
) -> None:
    out, png, table = tmp_path / "new" / "report.html", tmp_path / "png", tmp_path / "r.csv"
    ran = run(results, "--out", out, "--png", png, "--csv", table, "--trace", trace_file)
    assert (ran.status, ran.out) == (0, ""), ran
    assert ran.err.splitlines() == [f"wrote {path}" for path in (out, png, table)]
    assert out.read_text("utf-8") == page
    pictures = sorted(png.iterdir())
    assert len(pictures) == page.count("<svg")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert page.count("demo-90M, gsm8k</h2>") == 1
    titles = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert not [title for title in titles if "demo-90M" in title], "the pair stands above the plots, not in each"
    assert len(table.read_text("utf-8").splitlines()) == 1 + 2 * 6


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


def test_a_command_that_would_write_nothing_is_refused(results: Path, run: Callable[..., Ran]) -> None:
    assert_one_line(run(results), "give --out report.html, --png folder or --csv file")


def test_a_place_that_cannot_be_written_is_one_line(results: Path, tmp_path: Path, run: Callable[..., Ran]) -> None:
    (tmp_path / "file").write_text("")
    assert_one_line(run(results, "--csv", tmp_path / "file" / "r.csv"), "cannot be written")


def test_without_matplotlib_plots_are_refused_and_the_table_is_written(
    results: Path, tmp_path: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = "plots need matplotlib: pip install 'card-decoding[bench]', or ask for --csv alone"
    assert_one_line(run(results, "--out", tmp_path / "report.html"), said)
    assert not (tmp_path / "report.html").exists()
    assert run(results, "--csv", tmp_path / "r.csv").status == 0
    assert (tmp_path / "r.csv").exists()


def test_a_speed_up_is_told_with_its_range_and_that_it_is_none(results: Path) -> None:
    row = next(row for row in summarise(load_one(results)) if row.row == "card")
    (chart,) = speedups([replace(row, speedup=Spread.of([0.9, 0.8, 1.1]))], "x", BASELINE)
    assert chart.alt == "card 0.90× (0.80–1.10) slower"
