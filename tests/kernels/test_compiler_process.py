"""Code that another process compiles is there at the end; without that process this one compiles it."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from card.kernels import compiler_process
from card.kernels.compiler_process import CompilerProcess
from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is kept, and two cores are free; the processes that are started."""
    processes: list[Any] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler_process, "num_usable_cores", lambda: 2)
    monkeypatch.setattr(compiler_process.subprocess, "Popen", Popen)
    formats = machine_code("formats")  # whose code stays: models of other tests hold its bare addresses
    monkeypatch.setattr(formats, "multiplier", functools.cache(formats.multiplier.__wrapped__))
    return processes


def kept_names() -> set[str]:
    """Return the names of the functions that are kept."""
    folder = machine_code("object_code").kept_folder()
    return {file.name.rpartition("-")[0] for file in folder.glob("*.o")}


def test_a_pass_and_the_products_that_were_told_are_kept_at_the_end_of_the_block(started: list[Any]) -> None:
    with CompilerProcess() as compiler:
        compiler.compile(["f16", "bf16"])
        compiler.compile(["f16"])
    (process,) = started
    assert process.returncode == 0
    assert {"passes_run", "f16", "bf16"} <= kept_names()
    is_missing = machine_code("object_code").is_missing
    assert not is_missing("passes_run") and not is_missing("f16")
    with CompilerProcess() as compiler:
        compiler.compile(["f16"])
    assert len(started) == 1, "what is kept needs no process"


def test_what_a_process_that_fails_was_told_is_compiled_here(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with CompilerProcess() as compiler:
        started[0].wait()
        compiler.compile(["f16"])
    assert kept_names() == {"f16"}


def endless_program(folder: Path) -> str:
    """Return the path of a program that reads nothing and does not end."""
    program = folder / "endless"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o700)
    return str(program)


def test_a_process_that_never_ends_is_not_waited_for(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", endless_program(tmp_path))
    with CompilerProcess(patience_s=0.05) as compiler:
        compiler.compile(["f16"])
    assert started[0].returncode is not None
    assert kept_names() == {"f16"}


def test_an_error_ends_the_process_at_once(started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", endless_program(tmp_path))
    with pytest.raises(ValueError, match="no model"), CompilerProcess() as compiler:
        compiler.compile(["f16"])
        raise ValueError("no model")
    assert started[0].returncode is not None
    assert kept_names() == set()


@pytest.mark.parametrize("lacking", ["a second core", "a folder"])
def test_no_process_is_started_where_it_is_of_no_use(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if lacking == "a folder":
        monkeypatch.setattr(machine_code("object_code"), "kept_folder", lambda: None)
    else:
        monkeypatch.setattr(compiler_process, "num_usable_cores", lambda: 1)
    with CompilerProcess() as compiler:
        compiler.compile(["f16"])
    assert started == []
