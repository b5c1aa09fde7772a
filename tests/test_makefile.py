"""Each test is run by some target: no mark takes one away from all of them. CONTRIBUTING.md says when to run which."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
MARKS = [mark.partition(":")[0] for mark in _PYTEST["markers"]]


@cache
def recipes() -> dict[str, str]:
    """Return the commands of each target that runs tests, as make prints them."""
    targets = re.findall(r"^(test[a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    return {target: _printed(target) for target in targets}


def _printed(target: str) -> str:
    done = subprocess.run(["make", "-n", "-C", str(ROOT), target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _runs(expression: str, mark: str) -> bool:
    """Return whether an expression of pytest's -m takes a test with this mark alone."""
    return bool(eval(re.sub(r"\w+", lambda word: _value(word[0], mark), expression)))


def _value(word: str, mark: str) -> str:
    return word if word in ("and", "or", "not") else str(word == mark)


def expressions(recipe: str) -> list[str]:
    """Return the expressions of -m in a recipe."""
    return [quoted or bare for quoted, bare in re.findall(r"pytest\b[^\n]* -m (?:\"([^\"]+)\"|(\w+))", recipe)]


def test_every_mark_is_run_by_a_target() -> None:
    asked = [one for recipe in recipes().values() for one in expressions(recipe)]
    assert [mark for mark in MARKS if not any(_runs(one, mark) for one in asked)] == []


def test_a_mark_that_no_target_runs_is_found() -> None:
    (one,) = expressions('python -m pytest -n 2 -m "not gpu and not weights" tests')
    assert _runs(one, "slow") and not _runs(one, "gpu")
    assert expressions("python -m pytest -m gpu -rs tests/x") == ["gpu"]


def test_what_no_mark_takes_away_is_what_make_test_runs() -> None:
    (default,) = re.findall(r'-m "([^"]+)"', _PYTEST["addopts"])
    assert [mark for mark in MARKS if _runs(default, mark)] == []
    (slow, *_) = expressions(recipes()["test-slow"])
    assert [mark for mark in MARKS if _runs(slow, mark)] == ["slow"] and _runs(slow, "")
    assert "CARD_TEST_EXAMPLES=new" in recipes()["test-slow"]


def test_the_crosses_run_without_pytorch_too() -> None:
    for target in ("test-core", "test-slow"):
        assert "tests/crosses" in recipes()[target]


def test_every_target_of_tests_has_its_time_in_contributing() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    told = set(re.findall(r"`make (test[a-z-]*)", page))
    assert told == set(recipes())
    assert [mark for mark in MARKS if f"`{mark}`" not in page] == []


STUB = """#!/bin/sh
case "$1" in -c) echo 3.11; exit;; esac
echo "$(dirname "$0") $*" >> log
case "$*" in *venv*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; esac
case " $* " in *" $FAULT "*) exit 1;; esac
"""
STYLE = [".venv/bin ruff format", ".venv/bin ruff check"]
TYPES, COLLECT, BESIDE = ".venv/bin mypy", ".venv/bin pytest --collect-only", ".venv/bin pytest"
CORE = ".venv-core-3.11/bin pytest"


def done_by(folder: Path, fault: str) -> tuple[list[str], int]:
    """Run `make test` where Python only writes down what it is to do, and fails at a word; its work and the status."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    (folder / "log").write_text("")
    command = ["make", "test", "PYTHON=./python"]
    ran = subprocess.run(command, cwd=folder, env={**kept, "FAULT": fault}, capture_output=True, check=False)
    lines = (folder / "log").read_text().splitlines()
    return [" ".join(re.findall(r"^\S+|(?<= -m )(?:ruff )?\w+|--collect-only", line)) for line in lines], ran.returncode


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def test_each_part_of_make_test_runs_whatever_the_others_say_once_the_style_holds(clone: Path) -> None:
    first, status = done_by(clone, "none")
    assert status == 0
    set_up = [". venv", ". venv", ".venv-core-3.11/bin pip", ".venv/bin pip"]
    tests = [TYPES, COLLECT, BESIDE, CORE]
    assert sorted(first) == sorted([*set_up, *STYLE, *tests]), "both environments, once each"
    assert first.index(COLLECT) < first.index(BESIDE), "modules are compiled before tests begin"
    for fault in ("mypy", "--beside-core", "tests/test_without_torch.py"):
        parts, status = done_by(clone, fault)
        assert status != 0, fault
        assert parts[:2] == STYLE and sorted(parts[2:]) == sorted(tests), "what is set up stays"
        assert parts.index(COLLECT) < min(parts.index(BESIDE), parts.index(CORE))
    parts, status = done_by(clone, "format")
    assert status != 0 and parts == STYLE[:1]


def test_in_a_new_clone_the_cores_tests_do_not_wait_for_pytorch(clone: Path) -> None:
    parts, status = done_by(clone, ".[dev]")
    assert status != 0 and CORE in parts and not {*STYLE, TYPES, COLLECT, BESIDE} & {*parts}
