"""Code that is kept between starts is that of its source, whole, and nobody needs it to be kept."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from card.kernels.int8_linear import machine_code, why_not_int8

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for code."""
    monkeypatch.setattr(machine_code("object_code"), "kept_folder", lambda: tmp_path / "code")
    return tmp_path / "code"


def storing(number: int, written: list[int] | None = None) -> Callable[[Any, Any], None]:
    """Return what writes a function that stores a number where its argument says; notes that it was asked to."""

    def write(builder: Any, place: Any) -> None:
        (written if written is not None else []).append(number)
        vectors = machine_code("vectors")
        vectors.write(builder, vectors.ir.Constant(vectors.ir.IntType(64), number), place)

    return write


def kept(folder: Path) -> list[Path]:
    """Return the files that are kept, but for locks."""
    return [file for file in folder.iterdir() if file.suffix != ".lock"]


def stored(code: Any) -> int:
    """Run code and return what it stored."""
    place = np.zeros(1, np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address)(place.ctypes.data)
    return int(place[0])


def test_code_is_compiled_once_and_then_taken_from_the_disk(folder: Path) -> None:
    make, written = machine_code("object_code").ObjectCode, list[int]()
    assert [stored(make("seven", storing(7, written))) for _ in range(2)] == [7, 7]
    assert written == [7]
    assert [file.suffix for file in kept(folder)] == [".o"]


@pytest.mark.parametrize("change", [lambda content: content[:-8], lambda content: content[:40] + b"?" + content[41:]])
def test_a_kept_file_that_was_damaged_is_compiled_again(folder: Path, change: Callable[[bytes], bytes]) -> None:
    make, written = machine_code("object_code").ObjectCode, list[int]()
    make("seven", storing(7))
    (file,) = kept(folder)
    file.write_bytes(change(file.read_bytes()))
    assert stored(make("seven", storing(7, written))) == 7
    assert written == [7]
    make("seven", storing(7, written))
    assert written == [7], "it is whole again"


def test_of_two_that_need_the_same_code_at_once_one_makes_it(folder: Path) -> None:
    make, written, others, started = machine_code("object_code").ObjectCode, list[int](), list[Any](), threading.Event()

    def write(builder: Any, place: Any) -> None:
        started.set()
        other.join(0.2)  # it must wait meanwhile
        assert others == []
        storing(7, written)(builder, place)

    def take() -> None:
        started.wait()
        others.append(make("seven", storing(7, written)))

    other = threading.Thread(target=take)
    other.start()
    code = make("seven", write)
    other.join()
    assert [stored(code), stored(others[0])] == [7, 7]
    assert written == [7]


def test_code_that_another_process_makes_is_left_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, formats, made = machine_code("object_code"), machine_code("formats"), list[str]()

    def make(name: str) -> None:
        made.append(name)
        objects.ObjectCode(name, storing(len(made)))

    monkeypatch.setattr(formats, "multiplier", make)

    def write(builder: Any, place: Any) -> None:
        formats.prepare(["others", "ours"])
        storing(7)(builder, place)

    objects.ObjectCode("others", write)
    assert made == ["ours"]
    formats.prepare(["others", "ours"])
    assert made == ["ours", "others", "ours"], "what is made already is taken"


def test_code_that_cannot_be_kept_runs_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    objects = machine_code("object_code")
    monkeypatch.setattr(objects.os, "replace", full)
    assert stored(objects.ObjectCode("seven", storing(7))) == 7
    assert kept(folder) == []
