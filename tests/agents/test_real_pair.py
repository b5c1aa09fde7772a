"""Coding agents with Qwen2.5-Coder on `card serve`: the model may fail at its work, the server never does.

It needs the files that `make test-weights` fetches. Agents are told to work by commands of the shell alone and in few
words: a prompt has 200 to 2,000 tokens instead of up to 19,000. The commands are named, as a model of 1.5 B finds none
of its own, so that each agent goes through its whole loop of calls. Each test checks the server's part, that every
request was answered in full, and prints a line of what came of the work: what was listed, edited and run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
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
COMMANDS = ("ls", "sed -i s/-/+/ calc.py", "python3 test_calc.py")
EDIT = "The function add in calc.py must return a + b, and returns a - b. Write calc.py anew."  # for who calls nothing
WAY = "You work in a folder by commands of the shell. Call one command at a time. Say done when all is done."
MOST_TOKENS, MOST_STEPS = 300, 8  # of an answer; of an agent that does not end by itself
# Of a whole agent: a model of this size may never come to an end.
WORK_S = float(os.environ.get("CARD_AGENT_S", "270"))
LEFT = 499  # status of a request whose client went away


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    if missing := [file.name for file in PAIR if not file.is_file()]:
        pytest.skip(f"{WEIGHTS} has no {' and no '.join(missing)}; run make test-weights, or set CARD_WEIGHTS")
    target, draft = map(str, PAIR)
    bound = ("--max-request-tokens", str(MOST_TOKENS))
    with command(tmp_path_factory.mktemp("server"), target, "--draft", draft, *bound) as running:
        yield running


def task(tool: str, argument: str = "command") -> str:
    """Return what an agent is asked for: calls of one of its tools with one argument."""
    told = f"Call {tool} three times, each time with {argument} alone. Wait for the result before you call it again:"
    return "\n".join((told, *(f"{idx}. {one}" for idx, one in enumerate(COMMANDS, 1))))


def answers(server: Command, path: str, num_before: int) -> list[dict[str, Any]]:
    """Return the lines of requests that have ended, of those behind so many lines."""
    return [line for line in server.logged()[num_before:] if line["event"] == "request" and line["path"] == path]


def note_programs(home: Path) -> str:
    """Let `ls` and `python3` note in a file of the home that they were called; return the PATH with these."""
    folder = home / "noted"
    folder.mkdir(parents=True)
    for name in ("ls", "python3"):
        script = folder / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> "{home}/calls"\nexec "{shutil.which(name)}" "$@"\n', "utf-8")
        script.chmod(0o755)
    found = os.pathsep.join((str(folder), PROGRAMS, os.environ["PATH"]))
    (home / ".profile").write_text(f"export PATH='{found}'\n", "utf-8")  # of a login shell, which has a PATH of its own
    return found


def work(server: Command, repository: Path, name: str, script: str, path: str) -> None:
    """Let an agent work by a script of the shell; check the server's part, and print what came of the work."""
    home, num_before = repository.parent / "home", len(server.logged())
    home.mkdir(exist_ok=True)
    env = {"PATH": note_programs(home), "HOME": str(home), "LANG": "C.UTF-8"}
    began = time.monotonic()
    done = subprocess.run(
        ["timeout", "-k", "30", str(WORK_S), "bash", "-ec", script],
        cwd=repository,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds, printed = time.monotonic() - began, done.stdout
    has_ended = done.returncode not in (124, 137)
    # That of a client that has left is logged a little later.
    until(lambda: answers(server, path, num_before), complaint=lambda: printed)
    asked = answers(server, path, num_before)
    calls = (home / "calls").read_text("utf-8").splitlines() if (home / "calls").exists() else []
    num_refused = sum(line["status"] not in (200, LEFT) for line in asked)
    told = {
        "listed": any(call.startswith("ls") for call in calls),
        "edited": (repository / "calc.py").read_text("utf-8") == WRONG.replace("-", "+"),
        "ran": any("test_calc.py" in call for call in calls),
        "ended by itself": has_ended,
        "seconds": round(seconds),
        "tokens read": sum(line.get("prompt_tokens", 0) for line in asked),
        "tokens written": sum(line.get("new_tokens", 0) for line in asked),
        "requests": len(asked),
        "refused": num_refused,
    }
    print(f"{name}: {json.dumps(told)}", printed[-2000:], sep="\n")
    statuses = {line["status"] for line in asked}
    assert statuses <= ({200} if has_ended else {200, LEFT}), (statuses, printed)


def test_opencode_is_answered(server: Command, repository: Path) -> None:
    config = json.loads(documented("opencode", server)) | {"permission": {"bash": "allow"}, "autoupdate": False}
    config["provider"]["card"]["models"]["card"]["limit"] = {"context": 32_768, "output": MOST_TOKENS}
    # What sed is told looks to it like a path outside of the folder.
    rules = {"*": "deny", "bash": "allow", "external_directory": "allow"}
    config["agent"] = {"build": {"prompt": WAY, "steps": MOST_STEPS, "permission": rules}}
    (repository / "opencode.json").write_text(json.dumps(config), "utf-8")
    work(server, repository, "opencode", f"opencode run --title work '{task('bash')}'", "/v1/chat/completions")


def test_aider_is_answered(server: Command, repository: Path) -> None:
    script = documented("aider", server).rstrip()
    quiet = "--yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-gitignore --map-tokens 0"
    said = f"--edit-format whole --test-cmd 'python3 test_calc.py' --auto-test --message '{EDIT}' calc.py"
    work(server, repository, "aider", f"{script} {quiet} {said}", "/v1/chat/completions")


def test_claude_code_is_answered(server: Command, repository: Path) -> None:
    quiet = f"export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS={MOST_TOKENS}"
    limits = f"--system-prompt '{WAY}' --tools Bash --allowedTools Bash --max-turns {MOST_STEPS} || true"
    script = f"{quiet}\n{documented('Claude Code', server).rstrip()} -p '{task('Bash')}' {limits}"
    work(server, repository, "Claude Code", script, "/v1/messages")


def test_codex_is_answered(server: Command, repository: Path) -> None:
    folder = repository.parent / "home" / ".codex"
    folder.mkdir(parents=True)
    (folder / "way.md").write_text(WAY, "utf-8")
    few = f'model_instructions_file = "{folder / "way.md"}"\nweb_search = "disabled"\n'
    (folder / "config.toml").write_text(few + documented("Codex", server), "utf-8")
    without = " ".join(f"--disable {name}" for name in ("multi_agent", "goals", "view_image", "plugins", "apps"))
    script = f"codex exec --dangerously-bypass-approvals-and-sandbox {without} '{task('exec_command', 'cmd')}'"
    work(server, repository, "Codex", script, "/v1/responses")


def test_anthropics_client_is_answered(server: Command, repository: Path) -> None:
    script = f"python '{FOLDER / 'anthropic_client.py'}' {server.url} '{task('Bash')}'"
    work(server, repository, "Anthropic's client", script, "/v1/messages")
