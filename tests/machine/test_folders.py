"""Nothing is kept in, or taken from, a folder that others can write to or put another one in the place of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from card.machine.folders import make_private, opened, read_kept, replaced, why_unsafe, write_kept

OTHER = 4242  # a user who is neither this one nor the system


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in another one, both made for their owner alone."""
    make_private(tmp_path / "parent" / "folder")
    return tmp_path / "parent" / "folder"


@pytest.fixture
def owned_by_other(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Gives a path to another user, whoever runs the tests."""
    lstat, fstat = os.lstat, os.fstat
    others: set[int] = set()

    def of(facts: os.stat_result) -> os.stat_result:
        fields = list(facts)
        fields[4] = OTHER if facts.st_ino in others else facts.st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(os, "lstat", lambda path: of(lstat(path)))
    monkeypatch.setattr(os, "fstat", lambda number: of(fstat(number)))
    return lambda path: others.add(lstat(path).st_ino)


def test_what_is_made_is_its_owners_alone(folder: Path) -> None:
    assert {folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777} == {0o700}
    write_kept(folder / "new" / "file", b"content")
    assert (folder / "new").stat().st_mode & 0o777 == 0o700
    assert (folder / "new" / "file").stat().st_mode & 0o777 == 0o600
    assert read_kept(folder / "new" / "file") == b"content"
    assert why_unsafe(folder) is why_unsafe(folder / "not" / "there") is None


@pytest.mark.parametrize("mode", [0o777, 0o722, 0o702])
@pytest.mark.parametrize("below", ["", "not there yet"])
def test_a_folder_that_others_can_write_to_is_unsafe(folder: Path, mode: int, below: str) -> None:
    for one in (folder, folder.parent):
        one.chmod(mode)
        assert why_unsafe(folder / below) == (
            f"others can write to {one} (mode {mode:o}); run chmod go-w, or give a folder of your own"
        )
        one.chmod(0o755)
        assert why_unsafe(folder / below) is None


def test_a_folder_that_keeps_entries_to_their_owners_is_safe_to_lie_in(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert why_unsafe(folder) is None
    assert why_unsafe(folder.parent / "not there yet") is None
    assert "others can write to" in str(why_unsafe(folder.parent)), "they can add to it"


def test_a_folder_of_another_user_is_unsafe(folder: Path, owned_by_other: Callable[[Path], None]) -> None:
    owned_by_other(folder.parent)
    expected = f"{folder.parent} belongs to another user (uid {OTHER}); give a folder of your own"
    assert why_unsafe(folder) == expected


def test_a_folder_of_the_system_is_safe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert (why_unsafe(folder) is None) == (real == 0)


def test_links_are_followed_and_all_on_the_way_is_looked_at(folder: Path, tmp_path: Path) -> None:
    for name in ("own", "open"):
        make_private(tmp_path / name)
    (tmp_path / "open" / "link").symlink_to("../parent")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "open" / "link" / "folder")
    assert why_unsafe(tmp_path / "own" / "link") is None
    (tmp_path / "open").chmod(0o777)
    assert f"others can write to {tmp_path / 'open'} " in str(why_unsafe(tmp_path / "own" / "link"))
    (tmp_path / "open").chmod(0o700)
    folder.chmod(0o777)
    assert f"others can write to {folder} " in str(why_unsafe(tmp_path / "own" / "link"))


def test_a_link_of_another_user_is_unsafe(folder: Path, tmp_path: Path, owned_by_other: Callable[[Path], None]) -> None:
    (tmp_path / "link").symlink_to(folder)
    owned_by_other(tmp_path / "link")
    assert f"{tmp_path / 'link'} belongs to another user" in str(why_unsafe(tmp_path / "link"))


def test_links_in_a_circle_are_unsafe(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    assert why_unsafe(tmp_path / "one") is not None


@pytest.mark.parametrize("mode", [0o666, 0o622, 0o602])
def test_a_file_that_others_can_write_to_is_not_read(folder: Path, mode: int) -> None:
    write_kept(folder / "file", b"content")
    (folder / "file").chmod(mode)
    with pytest.raises(PermissionError, match="others could have written to it"):
        read_kept(folder / "file")


def test_a_file_of_another_user_is_not_read(folder: Path, owned_by_other: Callable[[Path], None]) -> None:
    write_kept(folder / "file", b"content")
    owned_by_other(folder / "file")
    with pytest.raises(PermissionError, match="others could have written to it"):
        read_kept(folder / "file")


def test_what_is_read_is_what_was_looked_at(folder: Path) -> None:
    write_kept(folder / "file", b"content")
    with opened(folder / "file") as stream:
        write_kept(folder / "file", b"of another")
        assert stream.read() == b"content"


def test_links_pipes_and_folders_are_no_kept_files(folder: Path) -> None:
    write_kept(folder / "file", b"content")
    (folder / "link").symlink_to("file")
    os.mkfifo(folder / "pipe", 0o600)
    (folder / "below").mkdir()
    for name in ("link", "pipe", "below", "missing"):
        with pytest.raises(OSError, match=name if name in ("link", "missing") else "it is no file"):
            read_kept(folder / name)


def test_a_file_that_cannot_be_written_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kept(folder / "file", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_kept(folder / "file", b"new")
    assert [one.name for one in folder.iterdir()] == ["file"]
    assert read_kept(folder / "file") == b"old"


def test_a_file_is_replaced_as_a_whole_or_stays_as_it_was(folder: Path) -> None:
    file = folder / "file.txt"
    for content, others in (("first", []), ("second", ["first"])):
        with replaced(file) as part:
            part.write_text(content)
            assert [one.read_text() for one in folder.glob("*.txt")] == others
    with pytest.raises(KeyboardInterrupt), replaced(file) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "second" and os.listdir(folder) == [file.name]
