"""`card train hivis`: what it writes, that it goes on where it was cut off, and what it refuses in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from card.family.hivis import command as train_hivis
from tests.commands import Ran, run_command
from tests.seeing import picture, save_seeing
from tests.trainings import check_a_command_goes_on, write_lines


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""
    return partial(run_command, capfd, "train", "hivis")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("seeing")
    save_seeing("llava", folder)
    return str(folder)


def conversation(text: str, url: str | None = "shown.png") -> dict[str, Any]:
    shown = [] if url is None else [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]}


def written(folder: Path, lines: list[dict[str, Any]]) -> str:
    picture(1).save(folder / "shown.png")
    return write_lines(folder / "talks.jsonl", lines)


def test_a_drafter_is_written_and_a_cut_off_training_ends_alike(run, seeing, tmp_path):
    data = written(tmp_path, [conversation(text) for text in ("cat", "mat")] + [conversation("six", None)] * 2)
    out = tmp_path / "whole"
    args = (
        "--target",
        seeing,
        "--data",
        data,
        "--max-tokens",
        "12",
        "--epochs",
        "3",
        "--width",
        "64",
        "--layers",
        "2",
        "--out",
    )
    ran = run(*args, str(out))
    assert (ran.status, ran.err) == (0, "")
    assert re.search(r"[\d.]+ tokens a target pass with 5 candidates, on texts that it did not learn from", ran.out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shown.png", "talks.jsonl", "whole"]

    check_a_command_goes_on(run, args, out, (train_hivis, "train_fused"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"question": "how many?"}], 'talks.jsonl, line 1: must be a JSON object with "messages"'),
        ([{"messages": []}], 'talks.jsonl, line 1: must be a JSON object with "messages"'),
        ([conversation("cat"), conversation("mat", "../shown.png")], "talks.jsonl, line 2: "),
        ([conversation("cat", "https://example.com/a.png")], "talks.jsonl, line 1: "),
        ([conversation("cat")], "1 answers have two tokens or more"),
    ],
)
def test_what_it_cannot_learn_from_is_refused_in_one_line(run, seeing, tmp_path, lines, said):
    data = written(tmp_path, lines)
    ran = run("--target", seeing, "--data", data, "--max-tokens", "4", "--out", str(tmp_path / "out"))
    assert ran.status == 2
    assert said in ran.err and "Traceback" not in ran.err and ran.err.count("\n") == 1
