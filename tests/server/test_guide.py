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


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_an_example_for_openais_client_prints_an_answer(
    server: Running, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code.replace(ADDRESS, server.url), "docs/server.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", CURL, ids=range(len(CURL)))
def test_an_example_for_curl_is_answered(server: Running, command: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    arguments = shlex.split(command.replace("\\\n", " ").replace(ADDRESS, server.url))
    done = subprocess.run(
        [*arguments, "--fail", "-sS"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"output"' in done.stdout


def test_the_guide_has_examples() -> None:
    assert len(PYTHON) >= 3 and CURL
