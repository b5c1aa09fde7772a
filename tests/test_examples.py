"""Every example runs, as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    assert "tokens per target pass" in done.stdout


def test_readme_shows_the_example_that_is_tested() -> None:
    code = (ROOT / "examples" / "generate.py").read_text().split('"""\n\n', 1)[1]
    assert code.strip() in (ROOT / "README.md").read_text()


def test_the_guide_to_the_python_api_shows_lines_of_the_examples_and_links_them_all() -> None:
    guide = (ROOT / "docs" / "python-api.md").read_text()
    for example in EXAMPLES:
        assert f"](../examples/{example.name})" in guide
    call = next(line for line in guide.splitlines() if "custom_generate=card.hf.generate, assistant" in line)
    assert call in (ROOT / "examples" / "transformers_generate.py").read_text()
