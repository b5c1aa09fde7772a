"""The examples of docs/server.md do what the guide says."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.running import PATIENCE_S, Running

pytestmark = pytest.mark.timeout(240)

GUIDE = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8000"
PYTHON = [block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if ADDRESS in block]
CURL = re.findall(r"^curl (?:.*\\\n)*.*$", GUIDE, re.MULTILINE)


ANSWERS = ("#### 16", "read_problem {'number': 2}", "#### 23")  # what the examples write at last


@pytest.mark.parametrize(("code", "answer"), list(zip(PYTHON, ANSWERS, strict=True)), ids=range(len(PYTHON)))
def test_an_example_for_openais_client_prints_its_answer(
    server: Running, code: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code.replace(ADDRESS, server.url), "docs/server.md", "exec"), {})
    assert answer in capsys.readouterr().out.splitlines()[-1]
    assert re.search(rf"# (\.\.\. )?{re.escape(answer)}\n", code), "the page shows what comes"


@pytest.mark.parametrize("command", CURL, ids=range(len(CURL)))
def test_an_example_for_curl_is_answered(server: Running, command: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    arguments = shlex.split(command.replace("\\\n", " ").replace(ADDRESS, server.url))
    done = subprocess.run(
        [*arguments, "--fail", "-sS"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "#### 20" in done.stdout


def test_the_guide_has_examples() -> None:
    assert CURL
