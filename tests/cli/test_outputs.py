"""A place that cannot be written is one line and status 2, before anything is loaded or measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from card.cli import main
from card.cli.parts.files import check_can_write, writing
from card.errors import SettingsError
from tests.processes import unhurried

pytestmark = pytest.mark.timeout(120)

_WORK = ("cli.commands.text.make_llm",)

Places = Callable[[str], Path]


@pytest.fixture(params=["below a file", "a folder", "a system's own", "a link to itself"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path that nobody can write a file to, not even root, and that is no folder that could be used."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    places = {"below a file": tmp_path / "file" / "below" / "out", "a folder": tmp_path / "folder",
              "a system's own": Path("/proc/card/out"), "a link to itself": tmp_path / "link"}  # fmt: skip
    places["a link to itself"].symlink_to("link")
    if request.param == "a system's own" and not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    return places[request.param]


def test_a_file_that_cannot_be_written_is_one_line_before_any_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert_refused(("generate", "hi", "--trace", str(place)), tmp_path, monkeypatch, capsys)
    assert sorted(tmp_path.rglob("*")) == [*before, tmp_path / "results"]


@pytest.mark.parametrize("arguments", [("keys",), ("keys", "--client", "ann")], ids=" ".join)
def test_a_folder_that_cannot_be_written_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "below", Path("/proc/card/keys")):
        assert_refused((*arguments, str(place)), tmp_path, monkeypatch, capsys)


def assert_refused(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    work: tuple[str, ...] = _WORK,
) -> None:
    """Check that a command says in one line what is wrong with a place, before it calls anything of ``work``."""
    for name in work:
        monkeypatch.setattr(f"card.{name}", lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    (tmp_path / "results").write_text("{}\n")
    given = [str(tmp_path / "results") if one == "RESULTS" else one for one in arguments]
    monkeypatch.setattr("sys.argv", ["card", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said
    assert said.out == ""
    assert said.err.startswith("card: error: ") and said.err.count("\n") == 1, said.err


def test_a_file_of_a_model_folder_that_the_command_names_is_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused = ("generate", "hi", "--target", str(tmp_path), "--trace", str(tmp_path / "config.json"))
    assert_refused(refused, tmp_path, monkeypatch, capsys)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_an_output_is_as_before_until_every_option_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").write_text("kept")
    refused = ("generate", "hi", "--trace", str(tmp_path / "old"), "--temperature", "-1")
    assert_refused(refused, tmp_path, monkeypatch, capsys)
    assert (tmp_path / "old").read_text() == "kept"


def test_an_output_that_is_cut_off_leaves_the_old_one(tmp_path: Path) -> None:
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("kept")
    old.chmod(0o640)
    link.symlink_to(old)
    with pytest.raises(KeyboardInterrupt), writing(link) as place:
        place.write_text("half")
        raise KeyboardInterrupt
    assert old.read_text() == "kept" and {*tmp_path.iterdir()} == {old, link}
    with writing(link) as place:
        place.write_text("whole")
    assert old.read_text() == "whole" and link.is_symlink() and old.stat().st_mode & 0o777 == 0o640


def test_an_output_that_a_link_names_is_made_where_it_leads(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "missing" / "new")
    check_can_write(link)
    with writing(link) as place:
        place.write_text("whole")
    assert (tmp_path / "missing" / "new").read_text() == "whole" and link.is_symlink()


def test_a_device_is_written_and_not_replaced() -> None:
    with writing(Path("/dev/null")) as place:
        place.write_text("lost")
    assert not Path("/dev/null").is_file()


def test_trying_a_place_leaves_it_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("kept")
    for path in (old, tmp_path / "new", tmp_path / "far" / "away" / "new", Path("/dev/null")):
        check_can_write(path)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"
    with pytest.raises(SettingsError, match="Is a directory; choose another place"):
        check_can_write(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    "arguments", [("methods",), ("generate", "--target", "demo-target", "--method", "vanilla", "hi")]
)
def test_an_output_that_is_full_is_one_line(arguments: tuple[str, ...], is_buffered: bool) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "card", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
            check=False,
        )
    assert ran.returncode == 2
    error = "card: error: the output cannot be written: No space left on device; write to another place"
    told = [line for line in unhurried(ran.stderr).splitlines() if "is built in and small" not in line]
    assert told == [error]
