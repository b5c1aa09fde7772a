"""The families that people run now, by the script that tries all of them for docs/models.md."""

from __future__ import annotations

import re

import pytest
import transformers
from gguf import MODEL_ARCH_NAMES

from card.models.files.gguf.relatives import RELATIVES
from tests.every_family import ROOT, script

RUNNING = {
    "llama": "own pass",
    "qwen3": "own pass",
    "gemma3_text": "own pass",
    "gemma4_text": "own pass",
    "gpt_oss": "own pass",
    "deepseek_v3": "transformers' modules",
    "mixtral": "own pass",
    "olmo3": "own pass",
    "phi3": "own pass",
    "gpt2": "transformers' modules",
}
REFUSED = {"bloom": "attention in code of their own", "doge": "a mask that it makes itself"}


@pytest.mark.parametrize("family", RUNNING)
def test_a_family_runs_with_transformers_logits(family: str) -> None:
    row = script().examine(family)
    assert (row.result, row.path) == ("equal", RUNNING[family])


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_run_is_refused_with_the_reason(family: str) -> None:
    row = script().examine(family)
    assert row.path == "" and REFUSED[family] in row.result


@pytest.fixture
def page() -> str:
    """Return the page; it tells of one version of transformers, and each has families of its own."""
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    told = re.findall(r"With transformers ([\d.]+):", text)
    assert len(told) == 1
    if told != [transformers.__version__]:
        pytest.skip(f"the page tells of transformers {told[0]}, and this is {transformers.__version__}")
    return text


def test_the_tables_are_what_the_script_writes_of_their_rows(page: str) -> None:
    assert script().page(script().rows_of(page), page) == page


def test_the_page_tells_of_every_family_and_how_many_run(page: str) -> None:
    rows = {row.family: row for row in script().rows_of(page)}
    assert set(script().families()) <= set(rows)
    assert f"{sum(row.runs for row in rows.values())} families run" in page
    for family, path in RUNNING.items():
        assert (rows[family].path, rows[family].shape, rows[family].result) == (path, "trees", "equal")


@pytest.mark.parametrize("family", REFUSED)
def test_what_the_page_says_of_a_refusal_is_what_the_code_says_without_the_family(family: str, page: str) -> None:
    rows = {row.family: row for row in script().rows_of(page)}
    assert rows[family].result == script().summary(script().examine(family).result)
    assert family not in rows[family].result


def test_what_is_not_read_from_gguf_files_but_from_folders_does_run() -> None:
    runs = {row.family for row in script().rows_of((ROOT / "docs" / "models.md").read_text("utf-8")) if row.runs}
    assert RELATIVES.keys() <= {*MODEL_ARCH_NAMES.values()}
    assert {*RELATIVES.values()} <= runs
