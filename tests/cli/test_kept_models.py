"""`card cache` lists what is kept of each model and removes it; what runs or is being packed is left alone."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from card.models.files.kept_weights import KeptWeights
from tests.commands import Ran, run_command

Listed = Callable[..., Ran]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder with copies of two models, one of them of the hub, and of one that nothing names."""

    def fill(num_bytes: int) -> Callable[[Path], object]:
        return lambda folder: (folder / "weights").write_bytes(bytes(num_bytes))

    store = tmp_path / "cache" / "gguf"
    (tmp_path / "a.gguf").touch()
    hub = tmp_path / "hub" / "models--Qwen--Small-GGUF" / "snapshots" / "1" / "b.gguf"
    for name, num_bytes, source in (("a1", 1000, tmp_path / "a.gguf"), ("a2", 500, tmp_path / "a.gguf"), ("b", 9, hub)):
        assert KeptWeights(store, source=source).make(name, num_bytes, fill(num_bytes)) is not None
    assert KeptWeights(store).make("old", 7, fill(7)) is not None
    return tmp_path / "cache"


@pytest.fixture
def listed(cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Listed:
    monkeypatch.chdir(cache.parent)
    return lambda *options: run_command(capfd, "cache", "--cache-dir", str(cache), *options)


def kept(cache: Path) -> set[str]:
    return {one.name for one in (cache / "gguf").iterdir()}


def test_the_copies_of_each_model_are_listed_and_none_is_removed(listed: Listed, cache: Path) -> None:
    sizes = json.loads(listed("--json").out)
    assert {Path(name).name for name in sizes} == {"a.gguf", "b.gguf", "unknown"}
    assert sizes[str(cache.parent / "a.gguf")] >= 1500
    shown = listed()
    assert shown.status == 0 and "a.gguf" in shown.out and "kept in" in shown.out
    assert kept(cache) == {"a1", "a2", "b", "old"}


@pytest.mark.parametrize(
    ("model", "left"),
    [
        ((), set()),
        (("a.gguf",), {"b", "old"}),
        (("Qwen/Small-GGUF",), {"a1", "a2", "old"}),
        (("c.gguf",), {"a1", "a2", "b", "old"}),
    ],
    ids=["all", "a file", "a hub name", "another name"],
)
def test_the_copies_of_one_model_or_of_all_are_removed(
    listed: Listed, cache: Path, model: tuple[str, ...], left: set[str]
) -> None:
    assert listed(*model, "--clear").status == 0
    assert kept(cache) == left


def test_a_copy_that_is_being_packed_stays_and_one_that_was_given_up_goes(listed: Listed, cache: Path) -> None:
    for name in ("busy", "killed", "lost"):
        (cache / "gguf" / f"{name}.unfinished").mkdir()
    (cache / "gguf" / "killed.lock").touch()
    with (cache / "gguf" / "busy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert listed("--clear").status == 0
        assert {name for name in kept(cache) if "unfinished" in name} == {"busy.unfinished"}


def test_a_folder_that_is_not_there_holds_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_command(capfd, "cache", "--cache-dir", str(tmp_path / "none"))
    assert (ran.status, ran.out.split(" kept in ")[0]) == (0, "0.0 GB")


def test_a_copy_that_cannot_be_removed_is_one_line(listed: Listed, cache: Path) -> None:
    elsewhere = cache.parent / "elsewhere"
    elsewhere.mkdir()
    (cache / "gguf" / "linked").symlink_to(elsewhere)
    refused = listed("--clear")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert f"{cache / 'gguf' / 'linked'} cannot be removed" in refused.err
    assert elsewhere.is_dir()


@pytest.mark.parametrize("options", [(), ("--clear",)], ids=str)
@pytest.mark.parametrize("given", ["a file", "a link to itself", ""])
def test_what_is_no_folder_is_one_line_and_nothing_is_removed(
    given: str,
    options: tuple[str, ...],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gguf" / "a").mkdir(parents=True)  # would be the cache's if nothing meant the working folder
    (tmp_path / "a file").touch()
    (tmp_path / "a link to itself").symlink_to("a link to itself")
    ran = run_command(capfd, "cache", "--cache-dir", given, *options)
    assert (ran.status, ran.out) == (2, "") and ran.err.count("\n") == 1 and "--cache-dir" in ran.err, ran.err
    assert (tmp_path / "gguf" / "a").is_dir()
