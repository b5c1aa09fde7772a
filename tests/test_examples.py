"""Every example runs, as a script of its own."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert "tokens per target pass" in capsys.readouterr().out


def test_readme_shows_the_example_that_is_tested() -> None:
    code = (ROOT / "examples" / "generate.py").read_text().split('"""\n\n', 1)[1]
    assert code.strip() in (ROOT / "README.md").read_text()


def test_links_of_the_readme_work_on_the_package_page_and_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text("utf-8"))
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    own = re.compile(re.escape(urls["Homepage"]) + "/(?:blob|tree)/main/([^#]+)")
    pictures = re.compile(
        re.escape(urls["Homepage"].replace("//github.com", "//raw.githubusercontent.com")) + "/main/(.+)"
    )
    places = []
    for link in links:
        assert link.startswith(("https://", "#")), f"{link} leads nowhere on the package page"
        if found := own.match(link) or pictures.match(link):
            places.append(found[1])
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_the_program_of_the_guide_to_the_python_api_answers_and_is_told_its_mistakes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide = (ROOT / "docs" / "python-api.md").read_text()
    (program,) = (one for one in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "llm.chat(conv" in one)
    exec(compile(program, "docs/python-api.md", "exec", dont_inherit=True), {"__name__": "guide"})
    first, *_, numbers, typo = capsys.readouterr().out.splitlines()
    assert "19 apples left" in first
    assert numbers == "got 1 sampling parameters for 2 prompts; give one for all, or one for each"
    assert typo == "unknown setting 'bugdet'; did you mean budget?"


def test_the_guide_to_the_python_api_shows_lines_of_the_examples_and_links_them_all() -> None:
    guide = (ROOT / "docs" / "python-api.md").read_text()
    for example in EXAMPLES:
        assert f"](../examples/{example.name})" in guide
    call = next(line for line in guide.splitlines() if "custom_generate=card.hf.generate, assistant" in line)
    assert call in (ROOT / "examples" / "transformers_generate.py").read_text()
