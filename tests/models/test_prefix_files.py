"""Files of rows: what was written comes back, what was damaged does not, and the folder keeps within its bounds."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from card.models.rows.parts import RowsPart
from card.models.rows.prefix_files import BLOCK_ROWS, PrefixFiles
from card.models.rows.row_tree import IntArray

ROW_BYTES = 24
MODEL, OTHER_MODEL = b"m" * 32, b"o" * 32
LEN = 2 * BLOCK_ROWS + 5


def text_of(num_tokens: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(0, 1 << 20, num_tokens)


def rows_of(num_tokens: int, seed: int = 0) -> bytes:
    return np.random.default_rng(100 + seed).bytes(num_tokens * ROW_BYTES)


class Rows:
    """The form of rows that are of use one by one."""

    def part_bytes(self, part: RowsPart) -> int:
        return (part.end - part.first) * ROW_BYTES

    def usable_rows(self, num_rows: int, text_len: int) -> int:
        return num_rows


def files_in(folder: Path, identity: bytes = MODEL, most_bytes: int = 1 << 30) -> PrefixFiles:
    return PrefixFiles(folder, identity, Rows(), most_bytes=most_bytes)


def put(files: PrefixFiles, text: IntArray, rows: bytes, *, is_long: bool = False) -> bool:
    """Write a file; return whether there was room."""
    with files.written(text, is_long=is_long) as add:
        for first in range(0, len(rows), BLOCK_ROWS * ROW_BYTES) if add is not None else ():
            assert add is not None
            add(memoryview(rows[first : first + BLOCK_ROWS * ROW_BYTES]))
    return add is not None


def get(files: PrefixFiles, text: IntArray, *, is_long: bool = False) -> bytes | None:
    """Return the rows of the longest beginning that is found; None if there is none or it cannot be read."""
    found, taken = files.find(text, is_long=is_long), list[bytes]()
    if found is None:
        return None
    is_whole = files.read(*found, lambda _, part, count: taken.append(part[: count * ROW_BYTES]))
    return b"".join(taken) if is_whole else None


def row_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.rows"))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("num_wanted", [1, BLOCK_ROWS, BLOCK_ROWS + 1, LEN - 1, LEN])
def test_the_rows_of_any_beginning_come_back_in_another_process(tmp_path: Path, num_wanted: int) -> None:
    text, rows = text_of(LEN), rows_of(LEN)
    put(files_in(tmp_path), text, rows)
    asked = np.append(text[:num_wanted], -1)
    assert get(files_in(tmp_path), asked) == rows[: num_wanted * ROW_BYTES]
    assert get(files_in(tmp_path), asked, is_long=True) is None
    assert get(files_in(tmp_path, OTHER_MODEL), asked) is None


def test_the_longest_beginning_is_taken_and_makes_shorter_ones_useless(tmp_path: Path) -> None:
    text, files = text_of(LEN), files_in(tmp_path)
    put(files, text[:40], rows_of(40))
    branch = np.append(text[:30], text_of(20, 5))
    put(files, branch, rows_of(50, 5))
    put(files, text, rows_of(LEN))
    assert get(files, text) == rows_of(LEN)
    assert get(files, branch) == rows_of(50, 5)
    assert len(row_files(tmp_path)) == 2
    assert files.find(text, is_long=False, more_than=LEN) is None


def test_another_server_sees_what_comes_and_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = files_in(tmp_path), files_in(tmp_path)
    put(one, text_of(LEN), rows_of(LEN))
    assert get(other, text_of(LEN)) == rows_of(LEN)
    found = other.find(text_of(LEN), is_long=False)
    assert found is not None
    row_files(tmp_path)[0].unlink()
    assert not other.read(*found, lambda _, part, count: None)
    assert other.find(text_of(LEN), is_long=False) is None
    assert not said(caplog)


def cut(content: bytearray) -> None:
    del content[-1]


def cut_head(content: bytearray) -> None:
    del content[20:]


def emptied(content: bytearray) -> None:
    content.clear()


def longer(content: bytearray) -> None:
    content.append(0)


def other_token(content: bytearray) -> None:
    content[60] ^= 1


def other_row(content: bytearray) -> None:
    content[-9] ^= 1


def other_check(content: bytearray) -> None:
    content[-1] ^= 1


def swapped_blocks(content: bytearray) -> None:
    block, end = BLOCK_ROWS * ROW_BYTES + 4, len(content) - 5 * ROW_BYTES - 4
    first, second = content[end - 2 * block : end - block], content[end - block : end]
    content[end - 2 * block : end] = second + first


def boundless(content: bytearray) -> None:
    content[40:44] = b"\xff" * 4


DAMAGES = [cut, cut_head, emptied, longer, other_token, other_row, other_check, swapped_blocks, boundless]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_left_aside_with_one_line_and_made_anew(
    tmp_path: Path, damage: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    text, rows = text_of(LEN), rows_of(LEN)
    put(files_in(tmp_path), text, rows)
    (file,) = row_files(tmp_path)
    content = bytearray(file.read_bytes())
    damage(content)
    file.write_bytes(content)
    files = files_in(tmp_path)
    assert get(files, text) is None
    assert get(files, text) is None
    (line,) = said(caplog)
    assert str(file) in line and "left aside" in line
    assert put(files, text, rows)
    assert get(files, text) == get(files_in(tmp_path), text) == rows
    assert len(said(caplog)) == 1


def test_a_file_of_another_model_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(files_in(tmp_path, OTHER_MODEL), text_of(LEN), rows_of(LEN))
    files_in(tmp_path)
    shutil.copy(row_files(tmp_path)[0], tmp_path / MODEL.hex()[:32])
    assert get(files_in(tmp_path), text_of(LEN)) is None
    assert "another model" in said(caplog)[0]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_others_could_have_written_is_left_aside(
    tmp_path: Path, is_link: bool, caplog: pytest.LogCaptureFixture
) -> None:
    put(files_in(tmp_path), text_of(LEN), rows_of(LEN))
    (file,) = row_files(tmp_path)
    if is_link:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.chmod(0o666)
    files = files_in(tmp_path)
    assert get(files, text_of(LEN)) is None and get(files, text_of(LEN)) is None
    assert len(said(caplog)) == 1


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        files_in(tmp_path)


def test_the_files_least_recently_used_make_room(tmp_path: Path) -> None:
    size = files_in(tmp_path).num_bytes(LEN)
    files = files_in(tmp_path, most_bytes=2 * size + 1)
    of_other = files_in(tmp_path, OTHER_MODEL, 2 * size + 1)
    put(of_other, text_of(LEN), rows_of(LEN))
    put(files, text_of(LEN, 1), rows_of(LEN, 1))
    for age, file in enumerate(row_files(tmp_path)):
        os.utime(file, (1000 + age, 1000 + age))
    assert get(of_other, text_of(LEN)) is not None  # it is the one used last now
    put(files, text_of(LEN, 2), rows_of(LEN, 2))
    assert get(files, text_of(LEN, 1)) is None
    assert get(files, text_of(LEN, 2)) == rows_of(LEN, 2)
    assert get(of_other, text_of(LEN)) == rows_of(LEN)
    assert not put(files, text_of(3 * LEN, 3), rows_of(3 * LEN, 3))
    assert len(row_files(tmp_path)) == 2


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="no room"):
        put(files, text_of(LEN), rows_of(LEN))
    monkeypatch.undo()
    with pytest.raises(KeyError), files.written(text_of(LEN), is_long=False) as add:
        assert add is not None
        add(memoryview(b"half"))
        raise KeyError
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    assert get(files, text_of(LEN)) is None


def test_what_a_killed_process_left_goes_after_a_while(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    old, new = (tmp_path / MODEL.hex()[:32] / name for name in ("old.part", "new.part"))
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    put(files, text_of(LEN), rows_of(LEN))
    assert not old.exists() and new.exists()
