"""Systems that lack what Linux has: made-up ones, on which the commands write the same text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from card.api.llm import LLM
from card.config import SamplingParams
from card.machine import memory, threads
from card.machine.memory import free_memory, whole_memory
from card.machine.threads import default_threads
from tests.pair import Pair
from tests.server.running import PATIENCE_S, command

pytestmark = pytest.mark.timeout(240)

# Read by each Python that starts, those of drafters too: takes away what macOS has not.
HIDING = """
import builtins, ctypes, io, mmap, os, pathlib

for name in ("sched_getaffinity", "sched_setaffinity", "waitid", "posix_fadvise", "memfd_create", "copy_file_range"):
    if hasattr(os, name):
        delattr(os, name)
for name in [one for one in dir(mmap) if one.startswith("MADV_") and one not in ("MADV_DONTNEED", "MADV_WILLNEED")]:
    delattr(mmap, name)
sysconf = os.sysconf

def told(name):
    if name == "SC_AVPHYS_PAGES":
        raise ValueError("unrecognized configuration name")
    return sysconf(name)

os.sysconf = told

def hidden(function):
    def call(path, *more, **options):
        if not isinstance(path, int) and str(os.fspath(path)).startswith(("/proc", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *more, **options)
    return call

for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")):
    setattr(module, name, hidden(getattr(module, name)))
"""
PROMPT = "the cat"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Variables under which Python finds no more than a Mac has."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDING, "utf-8")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2] / "src")])}


@pytest.fixture(scope="module")
def text(pair: Pair) -> str:
    with LLM(pair.target, method="vanilla") as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0))[0].outputs[0].text


def test_the_command_writes_the_same_text_with_a_drafter_in_a_process(
    pair: Pair, bare: dict[str, str], text: str
) -> None:
    models = ("--target", pair.target, "--draft", pair.draft, "--method", "sps", "--placement", "process", "--stats")
    asked = (*models, "--raw", "--temperature", "0", "--max-tokens", "12", PROMPT)
    ran = subprocess.run(
        [sys.executable, "-m", "card", "generate", *asked], env=bare, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert ran.stdout.rstrip("\n").startswith(text.rstrip("\n"))
    assert re.search(r" [1-9]\d* drafter passes", ran.stderr), ran.stderr


def test_the_server_writes_the_same_text(pair: Pair, bare: dict[str, str], text: str, tmp_path: Path) -> None:
    path = {"PYTHONPATH": bare["PYTHONPATH"]}
    before = "import os; assert not hasattr(os, 'sched_getaffinity')"
    with command(tmp_path, pair.target, "--draft-model", pair.draft, env=path, before=before) as server:
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)
        assert answer.json()["choices"][0]["text"] == text
        assert httpx2.get(f"{server.url}/metrics", timeout=PATIENCE_S).status_code == 200


def mac(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, int], tmp_path: Path) -> None:
    """Let this be a Mac that tells these numbers by name."""

    def sysconf(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(memory.os, "sysconf", sysconf)
    for module in (memory, threads):
        monkeypatch.setattr(module, "system_number", lambda name: numbers.get(name, 0))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for variable in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)


def test_a_mac_has_the_memory_that_it_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = memory.mmap.PAGESIZE
    numbers = {"hw.memsize": 1 << 30, "vm.page_free_count": 1000, "vm.page_pageable_external_count": 500}
    mac(monkeypatch, numbers, tmp_path)
    assert (whole_memory(tmp_path), free_memory(tmp_path)) == (1 << 30, 1500 * page)
    mac(monkeypatch, {"hw.memsize": 1 << 30}, tmp_path)
    assert free_memory(tmp_path) == 1 << 29, "half of all where it does not tell"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8}, 4), ({"hw.physicalcpu": 6}, 6), ({}, os.cpu_count())],
)
def test_a_pass_has_a_thread_for_each_fast_core_of_a_mac(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, numbers: dict[str, int], expected: int
) -> None:
    mac(monkeypatch, numbers, tmp_path)
    assert default_threads(tmp_path) == expected


@pytest.mark.parametrize("code", ["from card.__main__ import main; main()", "from card import LLM"])
def test_windows_is_told_the_way_in_one_line(code: str) -> None:
    program = f"import os; os.name = 'nt'; {code}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith(
        "on Windows use it in the Linux of WSL: https://learn.microsoft.com/windows/wsl"
    )
    assert code != "from card.__main__ import main; main()" or len(ran.stderr.splitlines()) == 1
