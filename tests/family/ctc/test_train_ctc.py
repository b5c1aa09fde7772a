"""`card train ctc`: what it writes and says, that it goes on where it was cut off, and what it refuses in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from card.family.ctc import command as train_ctc
from card.family.ctc.slots import Slots
from tests.commands import Ran, run_command
from tests.trainings import check_a_command_goes_on, write_lines

QUESTIONS = [
    {"question": f"how many {what}?", "answer": "is not read"} for what in ("cats", "mats", "dogs", "the", "a")
]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""
    return partial(run_command, capfd, "train", "ctc")


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_lines(tmp_path / "texts.jsonl", QUESTIONS)


def test_a_head_is_written_that_drafts_and_a_cut_off_training_ends_alike(run, pair, data, tmp_path, capfd):
    out = tmp_path / "whole.safetensors"
    args = ("--target", pair.target, "--data", data, "--max-tokens", "12", "--epochs", "3", "--out")
    ran = run(*args, str(out))
    assert (ran.status, ran.err) == (0, "")
    assert re.search(r"[\d.]+ tokens a target pass with 16 candidates, on texts that it did not learn from", ran.out)
    assert Slots.load(out).facts.loss == "ctc"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.jsonl", "whole.safetensors"], "no traces"
    drafted = run_command(
        capfd, "generate", "how many", "--target", pair.target, "--method", "ctc", "--ctc", str(out), "--json"
    )
    assert drafted.status == 0

    check_a_command_goes_on(run, args, out, (train_ctc, "train_head"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--data", "{data}", "--out", "{folder}/none/head"], "there is no folder"),
        (["--data", "{data}", "--out", "{folder}/old"], "is there already; choose another name, or delete it"),
        (["--data", "{data}", "--out", "{data}"], "would overwrite"),
        (["--data", "{data}", "--out", "{folder}/head", "--max-prompts", "1"], "1 answers have two tokens or more"),
        (["--data", "{data}", "--out", "{folder}/head", "--loss", "l2"], "'l2' is not one of 'ctc', 'cross-entropy'"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(run, pair, data, tmp_path, args, said):
    (tmp_path / "old").touch()
    named = [arg.format(data=data, folder=tmp_path) for arg in args]
    ran = run("--target", pair.target, *named)
    assert ran.status == 2
    assert said in ran.err and "Traceback" not in ran.err
