"""Programs that a model wrote, and the tests of MBPP (Austin et al. 2021, arXiv:2108.07732) that say if they are right.

A program runs in a Python of its own: isolated, in an empty folder, without writing a file, with bounds on processor
time and memory. That keeps accidents in. It is no fence against malice: the program may still read files and talk to
the network, so callers ask before they run any.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from card.errors import BenchError

_CPU_S, _WALL_S, _MEMORY_BYTES = 5, 15, 1 << 30
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Problem:
    """A function that is to be written, and its tests."""

    text: str
    tests: tuple[str, ...]
    setup: str  # code that stands before the tests

    @property
    def prompt(self) -> str:
        """What is asked: the text, and the first test, which tells the function's name."""
        return f"{self.text} Your code should pass this test:\n{self.tests[0]}\nAnswer with one block of Python code."


def read_problems(path: Path, limit: int) -> list[Problem]:
    """Return the first problems of a file. Raises: BenchError if it is not in MBPP's form, or has none."""
    problems = []
    try:
        for line in path.read_text("utf-8").splitlines():
            if line.strip() and len(problems) < limit:
                record = json.loads(line)
                tests = tuple(str(test) for test in record["test_list"])
                problems.append(Problem(str(record["text"]), (tests[0], *tests[1:]), record.get("test_setup_code", "")))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchError(f"{path} is not in MBPP's form, a text and a test_list a line: {error!r}") from error
    if not problems:
        raise BenchError(f"{path} has no problems; give a file with some, and a --limit of 1 or more")
    return problems


def code_of(answer: str) -> str:
    """Return the first fenced block of an answer, or all of it if it has none."""
    found = _FENCED.search(answer)
    return found[1] if found else answer


def passes(answer: str, problem: Problem) -> bool:
    """Run the code of an answer with the problem's tests; return whether it ended well."""
    program = "\n".join([code_of(answer), problem.setup, *problem.tests])
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-"],
                check=False,
                input=program.encode("utf-8", "replace"),
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_WALL_S,
                preexec_fn=_bound,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def _bound() -> None:
    """Bound the child's resources."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
