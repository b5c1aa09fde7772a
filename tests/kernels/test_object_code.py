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

from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code
from tests.shortage import no_more_files

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


@pytest.mark.parametrize(
    "change",
    [
        *(lambda content, length=length: content[:length] for length in (0, 1, 31, 32, 33, 64, 200)),
        lambda content: content[:-8],
        lambda content: content[:40] + b"?" + content[41:],
        lambda content: b"?" + content[1:],
        lambda content: content + b"garbage",
        lambda content: content[:64] + bytes(len(content) - 64),
    ],
)
def test_a_kept_file_that_was_damaged_is_compiled_again(folder: Path, change: Callable[[bytes], bytes]) -> None:
    make, written = machine_code("object_code").ObjectCode, list[int]()
    make("seven", storing(7))
    (file,) = kept(folder)
    file.write_bytes(change(file.read_bytes()))
    assert stored(make("seven", storing(7, written))) == 7
    assert written == [7]
    make("seven", storing(7, written))
    assert written == [7], "it is whole again"


def test_the_code_of_another_function_is_compiled_again(folder: Path) -> None:
    make, written = machine_code("object_code").ObjectCode, list[int]()
    make("seven", storing(7))
    (seven,) = kept(folder)
    seven.rename(seven.with_name(seven.name.replace("seven", "eight")))
    assert stored(make("eight", storing(8, written))) == 8
    assert written == [8], "a function that is not in it would be called at no address"


@pytest.mark.parametrize("spoil", ["folder", "file", "link", "pipe"])
def test_code_that_others_could_have_written_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoil: str
) -> None:
    objects, written = machine_code("object_code"), list[int]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = f"seven_{spoil}"  # what is logged once is logged once in this process
    objects.ObjectCode(name, storing(7))
    folder = tmp_path / "card" / "code" / objects.kept_name()
    assert {one.stat().st_mode & 0o077 for one in (tmp_path / "card", tmp_path / "card" / "code", folder)} == {0}
    (file,) = kept(folder)
    assert file.stat().st_mode & 0o077 == 0
    if spoil == "folder":
        (tmp_path / "card" / "code").chmod(0o777)
    elif spoil == "file":
        file.chmod(0o666)
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere") if spoil == "link" else os.mkfifo(file)
    before = file.lstat()
    assert stored(objects.ObjectCode(name, storing(8, written))) == 8
    assert written == [8]
    if spoil == "folder":
        assert file.lstat() == before, "nothing is kept there"
        assert [line for line in caplog.messages if "others can write to" in line] == [
            f"{folder} is not used for machine code: others can write to {tmp_path / 'card' / 'code'} (mode 777); "
            "run chmod go-w, or give a folder of your own"
        ]


def test_code_is_compiled_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert stored(machine_code("object_code").ObjectCode("seven_below_a_file", storing(7))) == 7
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_code_is_compiled_where_no_file_can_be_opened(folder: Path) -> None:
    make, written = machine_code("object_code").ObjectCode, list[int]()
    make("seven", storing(7))
    with no_more_files():
        assert stored(make("seven", storing(7, written))) == 7
    assert written == [7]
    assert len(kept(folder)) == 1


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
    monkeypatch.setattr(os, "replace", full)
    assert stored(objects.ObjectCode("seven", storing(7))) == 7
    assert kept(folder) == []
