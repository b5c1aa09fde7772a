"""Answers that are programs: which tests pass decides, and a program reaches nothing outside of its process."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from card.errors import PromptError, SettingsError
from card.family.judges import fence, programs
from card.family.judges.programs import (
    ProgramTask,
    check_fence,
    has_whole_program,
    read_tasks,
    run_behind_fence,
)
from tests.commands import Ran, run_command


def _status() -> str:
    file = Path("/proc/self/status")
    return file.read_text("utf-8") if file.exists() else ""


# Asked of the system and not of the fence: one that does not hold must fail here.
if platform.machine() not in ("x86_64", "aarch64") or "Seccomp:" not in _status():
    pytest.skip("this system has no filter of system calls", allow_module_level=True)

TASK = ProgramTask("Add one.", ("assert f(1) == 2", "assert f(2) == 4"))


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("Here it is:\n```python\ndef f(x):\n    return x + 1\n```\nUse it so:\n```python\nf(3)\n```", "10"),
        ("```\ndef f(x):\n    return 2 * x", "11"),  # cut off
        ("def f(x): return 2 * x", "11"),
        ("I cannot.", "00"),
        ("```python\nimport sys\ndef f(x): sys.exit()\n```", "00"),
        ("```python\nprint('11')\n```", "00"),
    ],
)
def test_the_outcome_is_which_tests_the_first_block_passes(answer: str, outcome: str) -> None:
    assert TASK.outcome(answer) == outcome


def test_a_program_that_does_not_end_fails_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit, strict = f"CPU_SECONDS = {fence.CPU_SECONDS} ", tmp_path / "fence.py"
    source = Path(fence.__file__).read_text("utf-8")
    assert limit in source
    strict.write_text(source.replace(limit, "CPU_SECONDS = 1 "))
    monkeypatch.setattr(programs.fence, "__file__", str(strict))
    assert TASK.outcome("```python\ndef f(x):\n    while True: pass\n```") == "00"


def test_a_program_is_whole_once_its_block_is_closed() -> None:
    answer = "Here it is:\n```python\ndef f(x):\n    return x + 1\n```"
    whole = [end for end in range(len(answer) + 1) if has_whole_program(answer[:end])]
    assert whole == [len(answer)] and has_whole_program(f"{answer}\nUse it so:\n```")
    assert TASK.outcome(answer) == TASK.outcome(f"{answer}\n```python\ndef f(x): return 4\n```")


FORBIDDEN = (
    *("open('/etc/passwd')", "open('new', 'w')", "import os; os.listdir('/')", "import os; os.stat('/')"),
    *("import os; os.kill(os.getppid(), 0)", "import os; os.fork()", "import os; os.execv('/bin/true', ['true'])"),
    *("import _posixsubprocess", "import resource; resource.setrlimit(resource.RLIMIT_CPU, (60, 60))"),
    *("import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) >= 0", "bytearray(1 << 31)"),
)


def test_a_program_reaches_no_file_no_network_no_process_and_no_more_memory() -> None:
    assert run_behind_fence("", FORBIDDEN) == "0" * len(FORBIDDEN)


def test_what_the_usual_modules_do_passes() -> None:
    tests = (
        "import math, re, random, collections, heapq; assert re.findall('a', 'aa') and random.random() < 1",
        "import datetime; assert datetime.datetime.strptime('2020', '%Y').year == 2020",
        "from typing import List; print('hello'); assert sorted([3, 1]) == [1, 3]",
    )
    assert run_behind_fence("", tests) == "111"


def test_without_a_fence_no_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_fence = tmp_path / "fence.py"
    open_fence.write_text(Path(fence.__file__).read_text().replace("if not close_fence()", "if True"))
    monkeypatch.setattr(programs.fence, "__file__", str(open_fence))
    assert run_behind_fence("", ("",)) == "0"
    with pytest.raises(SettingsError, match="--run-tests runs programs that a model wrote, behind a filter"):
        check_fence()


def test_tasks_of_both_forms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    mbpp = {"text": "Add one.", "test_list": ["assert f(1) == 2"], "test_setup_code": "K = 1"}
    stub = {
        "prompt": "from math import pi\n\ndef g(x):\n",
        "entry_point": "g",
        "test": "def check(c): assert c(1) > pi",
    }
    path.write_text("\n".join(map(json.dumps, (mbpp, stub))))
    added, called = read_tasks(path)
    assert added.question == "Add one. Your code should pass these tests:\n\nassert f(1) == 2"
    assert added.outcome("def f(x): return x + K") == "1"
    assert "def g(x):" in called.question and called.outcome("def g(x): return pi + x") == "1"


@pytest.mark.parametrize(
    "line", ['{"question": "1 + 1?"}', '{"text": "Add.", "test_list": []}', '{"text": 1, "test_list": ["a"]}']
)
def test_a_line_that_is_no_task_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(line)
    with pytest.raises(PromptError, match=r"tasks.jsonl, line 1.*MBPP \(text, test_list\)"):
        read_tasks(path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return partial(run_command, capfd, "train", "judge", "--run-tests")


def test_programs_need_a_file_of_tasks(run: Callable[..., Ran], tmp_path: Path) -> None:
    ran = run("--out", str(tmp_path / "judge.safetensors"))
    assert ran.status == 2 and "--run-tests needs --prompts" in ran.err and len(ran.err.splitlines()) == 1
