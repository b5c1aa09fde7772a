"""Answers that are programs, and are the same if the same tests pass: tasks in the forms of MBPP and HumanEval.

A model's program runs in a process of its own, behind the fence of `fence`: without files, without a network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card.cli.parts.files import parse_json_line
from card.errors import SettingsError
from card.family.judges import fence
from card.text.lines import numbered_lines

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_WALL_SECONDS = 20 * fence.CPU_SECONDS  # the limit of processor time comes first, but on a machine that stands still


@dataclass(frozen=True, slots=True)
class ProgramTask:
    """A task for a program, and its tests."""

    question: str
    tests: tuple[str, ...]  # each is run after the program, in its names
    preamble: str = ""  # runs before the program

    def outcome(self, answer: str) -> str:
        """Return 1 for each test that the answer's first block of code passes, 0 for each other one."""
        block = _BLOCK.search(answer)
        program = f"{self.preamble}\n{block[1] if block else answer}"
        return run_behind_fence(program, self.tests)


def has_whole_program(answer: str) -> bool:
    """Return whether the answer's first block of code is closed, so that what follows changes no outcome."""
    block = _BLOCK.search(answer)
    return block is not None and block[0].endswith("```")


def read_tasks(path: Path) -> list[ProgramTask]:
    """Return the tasks of a file of JSON lines in the form of MBPP or of HumanEval. Raises: PromptError."""
    wanted = "the fields of MBPP (text, test_list) or of HumanEval (prompt, test, entry_point)"
    return [parse_json_line(path, number, line, _task, wanted) for number, line in numbered_lines(path, "tasks")]


def _task(record: dict[str, Any]) -> ProgramTask | None:
    """Return the task of a record; None if it has a field of another kind. Raises: KeyError for a missing one."""
    if "test_list" in record:
        tests, setup = record["test_list"], record.get("test_setup_code", "")
        if not (tests and all(isinstance(one, str) for one in (record["text"], setup, *tests))):
            return None
        asked = "\n".join(tests)  # the wording is that of the paper, figure 1, without its examples
        return ProgramTask(f"{record['text']} Your code should pass these tests:\n\n{asked}", tuple(tests), setup)
    stub, test, name = (record[key] for key in ("prompt", "test", "entry_point"))
    if not all(isinstance(one, str) for one in (stub, test, name)):
        return None
    before, _, _ = stub.partition(f"def {name}")  # imports and helpers, which an answer may leave out
    return ProgramTask(f"Complete this function:\n\n```python\n{stub}```", (f"{test}\ncheck({name})",), before)


def run_behind_fence(program: str, tests: tuple[str, ...]) -> str:
    """Return 1 for each test that passes after the program, 0 for each other one, as text.

    The program fails what is left once it exceeds 5 s of processor time, 1 GB, or anything that the fence forbids.
    """
    script = [sys.executable, "-I", "-S", "-B", str(Path(fence.__file__))]
    with tempfile.TemporaryFile() as results:
        with subprocess.Popen(
            script, stdin=subprocess.PIPE, stdout=results, stderr=subprocess.DEVNULL, cwd="/", env={}
        ) as process:
            try:
                process.communicate(json.dumps([program, tests]).encode(), timeout=_WALL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        results.seek(0)
        passed = results.read(len(tests))
    return "".join("1" if passed[idx : idx + 1] == b"1" else "0" for idx in range(len(tests)))


def check_fence() -> None:
    """Refuse to run programs where no fence can be had. Raises: SettingsError."""
    if run_behind_fence("", ("", "open('/')")) != "10":
        raise SettingsError(
            "--run-tests runs programs that a model wrote, behind a filter of system calls that this machine does not"
            " offer; it takes Linux with seccomp on x86-64 or ARM64. Without it answers are compared by their numbers"
        )
