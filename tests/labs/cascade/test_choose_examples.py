"""`card choose-examples`: what it prints, and that whatever is wrong with its input is one line and status 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.commands import Ran, run_command
from tests.pair import Pair

WORDS = ["cat", "sat", "mat", "one", "two", "three", "four", "five", "six", "seven", "there", "other"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], pair: Pair) -> Callable[..., Ran]:
    """Run the command inside this process, for the tiny pair."""
    return partial(run_command, capfd, "choose-examples", "--target", pair.target, "--draft", pair.draft)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "solved.jsonl"
    lines = [json.dumps({"question": f"the {word}", "answer": f"{word} on the mat"}) for word in WORDS]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_it_prints_the_examples_and_what_they_cost(run, data):
    ran = run("--data", data, "--candidates", "24", "--held-out", "3", "--regret")
    assert (ran.status, ran.err) == (0, "")
    examples = [json.loads(line) for line in ran.out.splitlines() if line.startswith("{")]
    assert len(examples) == 2 and all(one["answer"].endswith("on the mat") for one in examples)
    for words in (
        "nats per token",
        "mean over the random probe",
        "rank correlation",
        "of 24",
        "above that of the best one",
    ):
        assert words in ran.out


def test_json_holds_the_same_and_the_same_seed_chooses_the_same(run, data):
    options = ("--data", data, "--candidates", "16", "--held-out", "3", "--shots", "1", "--json")
    first, second = (json.loads(run(*options).out) for _ in range(2))
    assert first == second
    assert first["candidates"] == 9 and 2 <= first["target_candidates"] <= 9  # of one example there are no more
    assert first["target_passes"] < first["draft_passes"] and first["regret"] is None
    assert first["loss"] <= first["mean_loss"] and len(first["examples"]) == 1


@pytest.fixture
def instructions(tmp_path: Path) -> str:
    path = tmp_path / "instructions.txt"
    path.write_text("\n".join([*(f"say {word}" for word in WORDS), "say cat", "", "cat " * 6000]), encoding="utf-8")
    return str(path)


def test_an_instruction_of_a_file_is_chosen_in_the_same_way(run, data, instructions):
    options = ("--data", data, "--instructions", instructions, "--held-out", "3", "--json")
    found = json.loads(run(*options, "--regret").out)
    assert found["instruction"] in {f"say {word}" for word in WORDS} and found["examples"] == []
    assert found["candidates"] == 13 and found["target_candidates"] <= 13  # the one that came twice is one
    assert found["regret"] >= 0.0 and found["loss"] <= found["mean_loss"]
    assert json.loads(run(*options, "--candidates", "5").out)["candidates"] == 5
    shown = run(*options[:-1]).out.splitlines()
    assert json.loads(shown[0])["instruction"].startswith("say ")


def test_instructions_may_be_lines_of_json(run, data, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"instruction": "two\nlines"}) + "\n", encoding="utf-8")
    found = json.loads(run("--data", data, "--instructions", str(path), "--json").out)
    assert (found["instruction"], found["correlation"], found["target_candidates"]) == ("two\nlines", None, 1)


def test_an_instruction_that_is_too_long_or_shown_with_examples_is_refused(run, data, instructions):
    for content, more, words in (
        ("cat " * 6000, (), "no instruction fits"),
        ("say cat", ("--shots", "2"), "leave --shots out"),
        ("", (), "holds no prompts"),
    ):
        Path(instructions).write_text(content, encoding="utf-8")
        ran = run("--data", data, "--instructions", instructions, *more)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1) and words in ran.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("--shots", "20"), "20 examples cannot be taken from 4 problems"),
        (("--held-out", "12"), "2 examples cannot be taken from 0 problems"),
        (("--shots", "0"), "--shots"),
        (("--draft", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(run, data, changes, words):
    ran = run("--data", data, *changes)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert words in ran.err


def test_a_line_without_an_answer_is_named(run, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "the cat", "answer": "sat"}\n{"question": "the mat"}\n', encoding="utf-8")
    ran = run("--data", str(path))
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert 'line 2: must be a JSON object with "question" and "answer", texts' in ran.err
