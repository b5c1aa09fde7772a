"""Coding agents with Qwen2.5-Coder on `card serve`: the model may fail at its work, the server never does.

It needs the files that `make test-weights` fetches. Agents are told to work by commands of the shell alone and in few
words: a prompt has 200 to 2,000 tokens instead of up to 19,000. A model of 1.5 B writes poor calls, so each test prints
what came of the work, and what it checks is the server's part: every request was answered in full.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.test_agents import FOLDER, PROGRAMS, WRONG, documented, repository
from tests.server.running import Command, command
from tests.waiting import until

pytestmark = [pytest.mark.agents, pytest.mark.timeout(7200)]

__all__ = ["repository"]
WEIGHTS = Path(os.environ.get("CARD_WEIGHTS", "build/weights")).absolute()
PAIR = [WEIGHTS / "qwen-1.5b.gguf", WEIGHTS / "qwen-0.5b.gguf"]
TASK = (
    "The function add in calc.py must return a + b, and returns a - b. List the files with ls, mend calc.py with sed, "
    "then run python3 test_calc.py."
)
WAY = "You work in a folder by commands of the shell. Call one command at a time. Say done when all is done."
MOST_TOKENS, MOST_STEPS = 300, 8  # of an answer; of an agent that does not end by itself
# Of a whole agent: a model of this size may never come to an end.
WORK_S = float(os.environ.get("CARD_AGENT_S", "1500"))
LEFT = 499  # status of a request whose client went away


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    if missing := [file.name for file in PAIR if not file.is_file()]:
        pytest.skip(f"{WEIGHTS} has no {' and no '.join(missing)}; run make test-weights, or set CARD_WEIGHTS")
    target, draft = map(str, PAIR)
    bound = ("--max-request-tokens", str(MOST_TOKENS))
    with command(tmp_path_factory.mktemp("server"), target, "--draft", draft, *bound) as running:
        yield running


def answers(server: Command, path: str, num_before: int) -> list[dict[str, Any]]:
    """Return the lines of requests that have ended, of those behind so many lines."""
    return [line for line in server.logged()[num_before:] if line["event"] == "request" and line["path"] == path]


def work(server: Command, repository: Path, script: str, path: str) -> None:
    """Let an agent work by a script of the shell; check the server's part, and print what came of the work."""
    home, num_before = repository.parent / "home", len(server.logged())
    home.mkdir(exist_ok=True)
    env = {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8"}
    has_ended = True
    try:
        done = subprocess.run(
            ["timeout", str(WORK_S), "bash", "-ec", script],
            cwd=repository,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WORK_S + 60,
            check=False,
        )
        printed, has_ended = done.stdout, done.returncode != 124
    except subprocess.TimeoutExpired as error:
        printed, has_ended = str(error.stdout), False
    # That of a client that has left is logged a little later.
    until(lambda: answers(server, path, num_before), complaint=lambda: printed)
    asked = answers(server, path, num_before)
    fixed = (
        subprocess.run(["python3", "test_calc.py"], cwd=repository, capture_output=True, check=False).returncode == 0
    )
    told = {
        "requests": len(asked),
        "ended by itself": has_ended,
        "changed calc.py": (repository / "calc.py").read_text("utf-8") != WRONG,
        "its test passes": fixed,
    }
    print(json.dumps(told), printed[-2000:], sep="\n")
    statuses = [line["status"] for line in asked]
    assert set(statuses) <= ({200} if has_ended else {200, LEFT}), (statuses, printed)


def test_opencode_is_answered(server: Command, repository: Path) -> None:
    config = json.loads(documented("opencode", server)) | {"permission": {"bash": "allow"}, "autoupdate": False}
    config["provider"]["card"]["models"]["card"]["limit"] = {"context": 32_768, "output": MOST_TOKENS}
    # What sed is told looks to it like a path outside of the folder.
    rules = {"*": "deny", "bash": "allow", "external_directory": "allow"}
    config["agent"] = {"build": {"prompt": WAY, "steps": MOST_STEPS, "permission": rules}}
    (repository / "opencode.json").write_text(json.dumps(config), "utf-8")
    work(server, repository, f"opencode run --title work '{TASK}'", "/v1/chat/completions")


def test_aider_is_answered(server: Command, repository: Path) -> None:
    script = documented("aider", server).rstrip()
    quiet = "--yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-gitignore --map-tokens 0"
    said = f"--edit-format whole --test-cmd 'python3 test_calc.py' --auto-test --message '{TASK}' calc.py"
    work(server, repository, f"{script} {quiet} {said}", "/v1/chat/completions")


def test_claude_code_is_answered(server: Command, repository: Path) -> None:
    quiet = f"export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS={MOST_TOKENS}"
    limits = f"--system-prompt '{WAY}' --tools Bash --allowedTools Bash --max-turns {MOST_STEPS} || true"
    script = f"{quiet}\n{documented('Claude Code', server).rstrip()} -p '{TASK}' {limits}"
    work(server, repository, script, "/v1/messages")


def test_codex_is_answered(server: Command, repository: Path) -> None:
    folder = repository.parent / "home" / ".codex"
    folder.mkdir(parents=True)
    (folder / "way.md").write_text(WAY, "utf-8")
    few = f'model_instructions_file = "{folder / "way.md"}"\nweb_search = "disabled"\n'
    (folder / "config.toml").write_text(few + documented("Codex", server), "utf-8")
    without = " ".join(f"--disable {name}" for name in ("multi_agent", "goals", "view_image", "plugins", "apps"))
    script = f"codex exec --dangerously-bypass-approvals-and-sandbox {without} '{TASK}'"
    work(server, repository, script, "/v1/responses")


def test_anthropics_client_is_answered(server: Command, repository: Path) -> None:
    work(server, repository, f"python '{FOLDER / 'anthropic_client.py'}' {server.url} '{TASK}'", "/v1/messages")
