"""CI tests the committed state in a clone named as `git clone` names it, below a folder with a space."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
MAKEFILE = "test:\n\t@pwd; git log --format=%s -1; cat committed; exit 7\n"


def test_no_limit_of_a_test_is_one_that_a_busy_machine_reaches(request: pytest.FixtureRequest) -> None:
    hung_s = float(request.config.getini("timeout"))
    assert hung_s > 2 * PATIENCE_S, "a test that waits in vain says for what"
    marks = {item.nodeid: item.get_closest_marker("timeout") for item in request.session.items}
    assert [name for name, mark in marks.items() if mark is not None and mark.args[0] < hung_s] == []


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    names = {f"GIT_{role}_{part}": "ci@localhost" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
    kept["PATH"] = f"{folder.parent / 'browser'}{os.pathsep}{kept['PATH']}"
    return subprocess.run(command, cwd=folder, env={**kept, **names}, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of two commits with the CI's command, and a Makefile that tells where it runs and fails."""
    (tmp_path / "browser").mkdir()
    shutil.copy(shutil.which("true") or "", tmp_path / "browser" / "chromium")  # there is one, so none is installed
    folder = tmp_path / "checkout"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    (folder / "Makefile").write_text(MAKEFILE)
    run(folder, "git", "init", "-q", "-b", "main")
    for text in ("first", "second"):
        (folder / "committed").write_text(f"{text}\n")
        run(folder, "git", "add", ".")
        run(folder, "git", "commit", "-q", "-m", text)
    return folder


@pytest.mark.parametrize("kind", ["whole", "shallow", "detached", "changed"])
def test_ci_runs_the_commit_in_a_clone_named_card_and_keeps_the_exit_status(kind: str, checkout: Path) -> None:
    expected = "second"
    if kind == "shallow":
        run(checkout.parent, "git", "clone", "-q", "--depth=1", checkout.as_uri(), "shallow")
        checkout = checkout.parent / "shallow"
    elif kind == "detached":
        run(checkout, "git", "checkout", "-q", "--detach", "HEAD^")
        expected = "first"
    elif kind == "changed":
        (checkout / "committed").write_text("never committed\n")
    ran = run(checkout, ".ci/run")
    place, *said = ran.stdout.splitlines()
    assert place.endswith("/a clone/card")
    assert said == [expected, expected]
    assert ran.returncode == 2, "make's status for a failed line"
    assert not Path(place).exists()
