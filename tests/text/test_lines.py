"""Lines of users' files end at LF or CRLF alone, and a byte order mark is no text."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from card.cli.parts.files import read_prompts, read_records
from card.errors import PromptError, SettingsError
from card.text import lines
from card.text.kept_lines import KeptLines
from card.text.lines import file_lines, numbered_lines, read_text

INSIDE = "a\u2028b\u2029c\x85d\x0ce\x0bf\x1cg\rh"  # what str.splitlines takes for ends of lines
BOM = b"\xef\xbb\xbf"


def test_only_lf_and_crlf_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(f"{INSIDE}\r\nsecond\n\nfourth".encode())
    assert numbered_lines(path, "prompts") == [(1, INSIDE), (2, "second"), (4, "fourth")]
    assert list(file_lines(path)) == [INSIDE, "second", "", "fourth"]


def test_a_byte_order_mark_is_no_text_and_inside_a_file_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(BOM + "first\nsec\ufeffond\n".encode())
    assert read_text(path) == "first\nsec\ufeffond\n"
    assert list(file_lines(path)) == ["first", "sec\ufeffond"]


def test_a_packed_file_has_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt.gz"
    path.write_bytes(gzip.compress(BOM + f"{INSIDE}\r\nsecond\n".encode()))
    assert list(file_lines(path)) == [INSIDE, "second"]


def test_json_lines_may_hold_separators_of_lines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "a\u2028b\x85c", "answer": "d\u2029e"}, {"question": "f", "answer": "g"}]
    path.write_bytes(BOM + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert read_records(path, "question", "answer") == tuple(rows)
    assert read_prompts(path) == ("a\u2028b\x85c", "f")


def test_a_text_file_of_prompts_is_told_from_json_lines_behind_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(BOM + b'{"question": "one"}\r\n')
    assert read_prompts(path) == ("one",)


def test_kept_lines_may_hold_separators_of_lines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text('{"run": 1}\n["key", "a\u2028b"]\n', "utf-8", newline="\n")
    assert KeptLines(path, {"run": 1}).found == {"key": "a\u2028b"}


def test_what_cannot_be_read_is_the_error_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(PromptError, match="latin is not valid UTF-8: byte 0xe9 at offset 3; convert it first"):
        read_text(path)
    with pytest.raises(SettingsError, match="cannot be read: No such file or directory; name another file"):
        read_text(tmp_path / "missing", SettingsError)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="the system has no such device")
def test_a_device_without_an_end_fills_no_memory() -> None:
    with pytest.raises(SettingsError, match="/dev/zero has no end in sight"):
        read_text(Path("/dev/zero"), SettingsError)


def piped(content: bytes) -> list[str]:
    """Return the lines of a pipe that has this content."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        return list(file_lines(Path(f"/dev/fd/{reader}")))
    finally:
        os.close(reader)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="the system names no open files")
@pytest.mark.parametrize("line", [b"a" * 40, b"a\n"], ids=["one line", "lines"])
def test_the_lines_of_a_pipe_without_an_end_fill_no_memory(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_PIPED_BYTES", 100)
    assert "\n".join(piped(line * 2)) == (line * 2).decode().removesuffix("\n")
    with pytest.raises(PromptError, match=r"/dev/fd/[0-9]+ has no end in sight; name a file"):
        piped(line * 60)


def test_a_file_may_be_longer_than_what_is_read_of_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_PIPED_BYTES", 100)
    (tmp_path / "long").write_text("a" * 300)
    assert list(file_lines(tmp_path / "long")) == ["a" * 300] == read_text(tmp_path / "long").split("\n")
