"""Programs that pages show for Python alone: they run as they stand, and write what the page lets one expect."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README_PAGES = sorted((ROOT / "src" / "card").rglob("README.md"))

pytestmark = pytest.mark.timeout(240)


def programs(page: Path) -> list[str]:
    """Return the programs of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def program(page: str, having: str = "") -> str:
    """Return the first program of a page, named by its path from the root, that has these words."""
    return next(one for one in programs(ROOT / page) if having in one)


def run(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a program; return what it writes."""
    capsys.readouterr()
    exec(compile(code, "docs", "exec"), {})
    return capsys.readouterr().out


@pytest.mark.parametrize("page", README_PAGES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_programs_of_a_folder_that_assert_what_they_do_run(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for code in programs(page):
        if "assert " in code:  # others need files or hardware: the folder's own tests run these
            run(code, capsys)


def test_the_program_of_choose_examples_finds_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = program("docs/choose-examples.md")
    assert "assert choice.best" in code
    run(code, capsys)


def test_the_program_of_report_writes_a_trace_of_an_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(program("docs/report.md"), capsys)
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]}
    assert {"candidates of request 0", "decode"} <= names


def test_the_program_for_asyncio_answers_as_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    code = program("docs/python-api.md", "async for")
    shown = re.findall(r"# \.\.\. (.*)", code)
    whole = "import asyncio\nfrom card import AsyncLLM, SamplingParams\n\nasync def main():\n"
    told = run(f"{whole}{textwrap.indent(code, '    ')}\nasyncio.run(main())", capsys)
    assert [told.splitlines()[-1]] == shown == ["#### 144"]


@pytest.mark.parametrize("of", ["LLM", "AsyncLLM"])
def test_the_programs_of_docstrings_answer(of: str, capsys: pytest.CaptureFixture[str]) -> None:
    import card

    doc = re.search(r"\n\n((?:    .*\n)+)\n", textwrap.dedent(f"    {getattr(card, of).__doc__}"))
    assert doc
    code = textwrap.dedent(doc[1])
    head = "import asyncio\nfrom card import LLM, AsyncLLM\n"
    if of == "AsyncLLM":
        code = f"async def main():\n{textwrap.indent(code, '    ')}\nasyncio.run(main())"
    assert run(head + code, capsys).strip().endswith("#### 144")
