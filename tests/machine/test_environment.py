"""The command runs for a user without name or home, in a locale of ASCII, and on an output that lacks characters."""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from card.errors import SettingsError
from card.machine import environment
from card.machine.children import import_paths
from card.machine.folders import cache_folder, expanded
from tests.machine_code import is_kept, lent

BRIEFLY = ("--max-tokens", "2", "--dtype", "auto")
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# What the system says of a user id that it has no name for, whoever runs the tests.
NAMELESS = """
import pwd
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
from card.__main__ import main
main()
"""


def run(*command: str, env: dict[str, str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(
        [sys.executable, *command], env=environment, input=stdin, capture_output=True, check=False, timeout=240
    )


def told(done: subprocess.CompletedProcess[bytes]) -> list[bytes]:
    """Return what standard error got, but for time on a busy machine, what the model knows, and what cut it off."""
    expected = re.compile(rb".* s\)|card: the answer is cut off: .*|card: demo-target is built in and small: .*")
    return [line for line in done.stderr.splitlines() if not expected.fullmatch(line)]


def test_a_user_without_name_and_home_gets_an_answer_and_keeps_things_among_temporary_files(tmp_path: Path) -> None:
    cache = lent(tmp_path / f"card-{os.geteuid()}")
    done = run("-c", NAMELESS, "generate", "hi", *BRIEFLY, env={"TMPDIR": str(tmp_path)})
    assert (done.returncode, told(done)) == (0, [])
    assert done.stdout.strip()
    assert is_kept(cache) and [*tmp_path.iterdir()] == [cache]


def test_a_user_without_name_is_named_for_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")  # so that it is as it was after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    environment.name_the_user()
    assert getpass.getuser() == f"uid-{os.getuid()}"


def test_a_user_without_home_may_write_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert expanded("~/models") == cache_folder("~/models") == Path("~/models")


@pytest.mark.parametrize("env", [ASCII, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_arguments_and_standard_input_are_utf8_in_any_locale(env: dict[str, str]) -> None:
    code = "from card.machine.environment import settle; settle(); import sys; print(ascii(sys.argv[1:]))"
    assert run("-c", code, "grüße 🙂", env=env).stdout.decode().strip() == ascii(["grüße 🙂"])


def test_a_prompt_of_utf8_is_read_in_a_locale_of_ascii(tmp_path: Path) -> None:
    lent(tmp_path / ".cache" / "card")
    done = run("-m", "card", "chat", *BRIEFLY, env={**ASCII, "HOME": str(tmp_path)}, stdin="grüße\n".encode())
    assert (done.returncode, told(done)) == (0, [])
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("encoding", "written"), [("latin-1", b"gr\xfcn \\ud83d\\ude42"), ("ascii", "grün 🙂".encode())]
)
def test_a_path_that_the_output_cannot_write_is_no_end(tmp_path: Path, encoding: str, written: bytes) -> None:
    done = run("-m", "card", "keys", str(tmp_path / "grün 🙂"), env={"PYTHONIOENCODING": encoding})
    assert (done.returncode, told(done)) == (0, [])
    assert done.stdout.splitlines()[0] == os.fsencode(tmp_path) + b"/" + written + b"/server"


def test_json_stays_json_where_the_output_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    environment.write_all_characters()
    said = {"text": 'grün 🙂 \u2028 "quoted" \udcff'}
    print(json.dumps(said, ensure_ascii=False), flush=True)
    assert json.loads(out.buffer.getvalue().decode("latin-1")) == said  # type: ignore[attr-defined]


CLOSED = """
import os
for number in {numbers}:
    os.close(number)
os.execv({python!r}, [{python!r}, *{command!r}])
"""


@pytest.mark.parametrize("numbers", [[1], [0, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("command", [["methods"], ["generate", "hi", *BRIEFLY], ["chat"]], ids=" ".join)
def test_a_command_whose_standard_streams_are_closed_runs(
    numbers: list[int], command: list[str], tmp_path: Path
) -> None:
    lent(tmp_path / ".cache" / "card")
    code = CLOSED.format(numbers=numbers, python=sys.executable, command=["-m", "card", *command])
    done = run("-c", code, env={"HOME": str(tmp_path)})
    assert (done.returncode, told(done), done.stdout) == (0, [], b"")


def test_a_file_never_takes_the_number_of_a_closed_standard_stream() -> None:
    code = "from card.machine.environment import settle; settle(); import os; number = os.open('/', 0); "
    done = run(
        "-c", CLOSED.format(numbers=[0, 1], python=sys.executable, command=["-c", code + "os._exit(number)"]), env={}
    )
    assert done.returncode > 2, done.stderr


@pytest.mark.parametrize("name", ["n" * 256, "é" * 128, "n/" * 2048], ids=["a name", "in bytes", "a path"])
def test_a_path_that_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="is too long for a name of a file"):
        expanded(name)
    assert expanded(name[: len(name) - 2]) == Path(name[: len(name) - 2])


def test_a_child_starts_where_the_working_folder_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert import_paths(["", "/lib"])[0] == "/lib"
