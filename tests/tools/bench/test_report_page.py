"""A report in a real browser: it fits the screen in both modes, and keeps nobody out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from card.tools.bench.report.page import render
from card.tools.bench.summary import summarise
from tests.browser import PATIENCE_MS, chromium, faults_by_axe
from tests.tools.bench.bench_files import ROWS, make_run

pytestmark = pytest.mark.timeout(240)

LONG_NAME = "card,beam_width=8,budget=32,verify=tree,growth=best-first,all-cores"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = (*ROWS, (LONG_NAME, "card", 61.0, 3.0, 180.0))
    runs = [
        make_run(rows=rows, workloads=("gsm8k", "chat", "copy-edit")),
        make_run(run_id="run-2", pairs=("one", "two")),
    ]
    summaries = [(run, summarise(run)) for run in runs]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(summaries), encoding="utf-8")
    return path


def opened(browser: Browser, report: Path, *, width: int, scheme: str = "light") -> Page:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE_MS)
    page.goto(report.as_uri())
    return page


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_is_as_wide_as_the_screen_and_only_tables_scroll_in_their_boxes(
    browser: Browser, report: Path, width: int
) -> None:
    page = opened(browser, report, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wider = "all => all.map((box) => box.querySelector('table').scrollWidth > box.clientWidth)"
    is_wider = page.locator(".box").evaluate_all(wider)
    assert any(is_wider), "a table of all figures has its place in a box"
    assert page.locator("figure").first.evaluate("plot => plot.getBoundingClientRect().width") >= 320
    sizes = "all => all.map((one) => parseFloat(getComputedStyle(one).fontSize))"
    assert min(page.locator("figure *").evaluate_all(sizes)) >= 14
    bars = "all => all.filter((bar) => bar.className != 'mark').map((bar) => bar.getBoundingClientRect().width)"
    assert max(page.locator(".lane i").evaluate_all(bars)) >= 250
    page.close()


def test_a_table_is_scrolled_by_keys_while_the_names_of_its_rows_stay(browser: Browser, report: Path) -> None:
    page = opened(browser, report, width=360)
    box = page.locator(".box").first
    box.focus()
    box.press("End")
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.box').scrollLeft > 100")
    for name in box.locator("th:first-child").all():
        assert (name.bounding_box() or {})["x"] == pytest.approx((box.bounding_box() or {})["x"], abs=2)
    page.close()


def test_plots_lie_side_by_side_where_there_is_room(browser: Browser, report: Path) -> None:
    lefts = {}
    for width in (360, 1200):
        page = opened(browser, report, width=width)
        plots = page.locator(".plots").first.locator("figure")
        lefts[width] = {round((plot.bounding_box() or {})["x"]) for plot in plots.all()}
        page.close()
    assert len(lefts[360]) == 1
    assert len(lefts[1200]) == 3


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1200, "dark")])  # no rule of the page is for both
def test_axe_finds_no_fault_with_the_page(browser: Browser, report: Path, width: int, scheme: str) -> None:
    page = opened(browser, report, width=width, scheme=scheme)
    assert faults_by_axe(page) == []
    page.close()
