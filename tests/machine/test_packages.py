"""Messages name the command that adds an extra where the package came from: folder, file, repository or index."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from card.machine.packages import install_command

Note = Callable[[dict[str, Any] | None], None]
PIP = f"{shlex.quote(sys.executable)} -m pip"
COMMIT = "5ac1cd8f0d4a9d6f5d6a1f0f3c7b1e2d3c4b5a69"


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Note:
    """Puts an installed package before the real one; its installer noted this about its origin, or nothing."""
    folder = tmp_path / "site" / "card_decoding-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: card-decoding\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(folder.parent))

    def note(origin: dict[str, Any] | None) -> None:
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))

    return note


@pytest.mark.parametrize(("dir_info", "option"), [({"editable": True}, "-e "), ({"editable": False}, ""), ({}, "")])
def test_a_package_from_a_folder_gets_its_extras_from_that_folder(
    noted: Note, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dir_info: dict[str, Any], option: str
) -> None:
    checkout = tmp_path / "it's a checkout"
    checkout.mkdir()
    noted({"url": checkout.as_uri(), "dir_info": dir_info})
    command = install_command("serve")
    assert command.startswith(f"{PIP} install {option}")
    assert shlex.split(command)[-1] == f"{checkout}[serve]"
    monkeypatch.chdir(checkout)
    assert install_command("serve") == f"{PIP} install {option}'.[serve]'"
    checkout.rmdir()  # neither the folder nor the place where the command runs is there any more
    assert shlex.split(install_command("serve"))[-1] == f"{checkout}[serve]"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "card-decoding[grammar]"),
        (
            {"url": "file:///tmp/card_decoding-0.1.0-py3-none-any.whl", "archive_info": {"hash": "sha256=00"}},
            "card-decoding[grammar] @ file:///tmp/card_decoding-0.1.0-py3-none-any.whl",
        ),
        (
            {"url": "https://example.com/card_decoding-0.1.0.tar.gz", "archive_info": {}},
            "card-decoding[grammar] @ https://example.com/card_decoding-0.1.0.tar.gz",
        ),
        (
            {
                "url": "https://example.com/card.git",
                "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT},
            },
            f"card-decoding[grammar] @ git+https://example.com/card.git@{COMMIT}",
        ),
        (
            {
                "url": "ssh://git@example.com/all.git",
                "vcs_info": {"vcs": "git", "commit_id": COMMIT},
                "subdirectory": "card",
            },
            f"card-decoding[grammar] @ git+ssh://git@example.com/all.git@{COMMIT}#subdirectory=card",
        ),
    ],
)
def test_a_package_from_elsewhere_gets_its_extras_from_there(
    noted: Note, origin: dict[str, Any] | None, requirement: str
) -> None:
    noted(origin)
    assert install_command("grammar") == f"{PIP} install '{requirement}'"


def test_pytorch_comes_first_and_in_its_small_build_where_it_is_not_installed(
    noted: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted(None)
    monkeypatch.setattr("card.machine.packages.find_spec", lambda _: None)
    torch, rest = install_command("torch").split(" && ")
    assert torch == f"{PIP} install torch --index-url https://download.pytorch.org/whl/cpu"
    assert rest == f"{PIP} install 'card-decoding[torch]'"
    assert " && " not in install_command("serve")
    monkeypatch.setattr("card.machine.packages.find_spec", lambda _: object())
    assert install_command("torch") == rest


def test_a_checkout_that_was_never_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[2]
    code = "from card.machine.packages import install_command as of; print(of('serve'))"
    of_src = {"PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=of_src, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{PIP} install -e '{root}[serve]'", done.stderr


def test_the_extra_that_serves_brings_what_holds_answers_to_a_form() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extras = pyproject["project"]["optional-dependencies"]
    assert "card-decoding[grammar]" in extras["serve"]
    assert any(needed.startswith("llguidance") for needed in extras["grammar"])
