"""Coding agents on `card serve`: each lists a file, edits it and runs a test, configured as docs/agents.md says."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.scripted import TASK, THOUGHTS, working_model
from tests.server.running import Command, command

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
PROGRAMS = os.pathsep.join(map(str, (FOLDER / "node_modules" / ".bin", PYTHON.parent)))
_TIMEOUT_S = 300.0
WRONG = "def add(a, b):\n    return a - b\n"
CHECK = "from calc import add\n\nassert add(2, 3) == 5\n"
STEPS = ["ls", "sed -i s/-/+/ calc.py", "python3 test_calc.py"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("server")
    model = working_model()
    model.model.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    with command(folder, str(folder / "model"), "--dtype", "float32", "--method", "vanilla") as running:
        yield running


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with a file that has a fault, and its test."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "calc.py").write_text(WRONG, "utf-8")
    (folder / "test_calc.py").write_text(CHECK, "utf-8")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def documented(agent: str, server: Command) -> str:
    """Return what the page says to paste for an agent, for this server."""
    page = (ROOT / "docs" / "agents.md").read_text("utf-8")
    (block,) = re.findall(rf"^## {agent}\n.*?```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    return str(block).replace("http://127.0.0.1:8000", server.url)


def run(repository: Path, script: str) -> str:
    """Run a script of the shell in a home of its own, and return what it printed."""
    home = repository.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=repository,
        env={"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}"
    return done.stdout


def check(server: Command, repository: Path, printed: str, path: str) -> None:
    """Check that the work is done, and that the server answered each request of an agent."""
    assert "All is" in printed and "well." in printed
    assert (repository / "calc.py").read_text("utf-8") == WRONG.replace("-", "+")
    asked = [line for line in server.logged() if line["event"] == "request" and line["path"] == path]
    assert len(asked) >= 4 and {line["status"] for line in asked} == {200}


def test_claude_code_does_its_work(server: Command, repository: Path) -> None:
    script = f"export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1\n{documented('Claude Code', server)}".rstrip()
    check(server, repository, run(repository, f"{script} -p {TASK} --allowedTools Bash"), "/v1/messages")


def test_codex_does_its_work(server: Command, repository: Path) -> None:
    config = repository.parent / "home" / ".codex" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(documented("Codex", server), "utf-8")
    printed = run(repository, f"codex exec --dangerously-bypass-approvals-and-sandbox {TASK}")
    check(server, repository, printed, "/v1/responses")


def test_opencode_does_its_work(server: Command, repository: Path) -> None:
    config = json.loads(documented("opencode", server)) | {"permission": {"bash": "allow"}, "autoupdate": False}
    (repository / "opencode.json").write_text(json.dumps(config), "utf-8")
    check(server, repository, run(repository, f"opencode run {TASK}"), "/v1/chat/completions")


def test_aider_edits_a_file_and_runs_its_test(server: Command, repository: Path) -> None:
    script = documented("aider", server).rstrip()
    quiet = "--yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-gitignore"
    work = f"--edit-format diff --test-cmd 'python3 test_calc.py' --auto-test --message {TASK} calc.py"
    run(repository, f"{script} {quiet} {work}")
    assert (repository / "calc.py").read_text("utf-8") == WRONG.replace("-", "+")


def test_anthropics_client_works_until_nothing_is_called(server: Command, repository: Path) -> None:
    told = json.loads(run(repository, f"python '{FOLDER / 'anthropic_client.py'}' {server.url} {TASK}"))
    assert [one.partition(" && ")[0] for one in told["commands"]] == STEPS
    assert told["thoughts"] == [THOUGHTS] * 4, "each turn sends back those before it"
    assert told["text"].startswith("All is") and told["reason"] == "end_turn"
    check(server, repository, told["text"], "/v1/messages")
