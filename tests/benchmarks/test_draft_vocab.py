"""The script that counts what a part of the vocabulary costs a draft model: its chains are those of the text."""

from __future__ import annotations

import sys

from tests.benchmarks.scripts import lines_of
from tests.trainings import write_lines


def test_a_chain_is_right_as_far_as_its_choices_are_the_texts(bench):
    steps_of = bench["draft_vocab"].steps_of
    right = [True, True, True, False, True, False, False, True]
    assert steps_of(right, 2) == [2, 1, 0, 1], "behind the first token, which comes of the prompt"
    assert steps_of(right, 1) == [1, 0, 1, 0, 1]


def test_what_was_read_is_proposed_from_then_on(bench):
    answer = bench["draft_vocab"].Answer((1,), (5, 1, 5, 7), 0, ranked=bench["draft_vocab"].np.array([[5, 9]] * 4))
    assert answer.right({9}, reads=False) == [False] * 4
    assert answer.right({9}, reads=True) == [False, False, True, False]
    assert answer.right({5}, reads=False) == [True, False, True, False]


def test_a_run_has_a_line_for_each_part_and_all_tokens_lose_nothing(bench, tmp_path, monkeypatch):
    rows = [{"question": "Tom has 3 apples and buys 4. How many has he?"}]
    asked = ["--prompts", write_lines(tmp_path / "a.jsonl", rows), "--max-tokens", "12", "--sizes", "100"]
    models = ["--target", "demo-target", "--draft", "demo-draft", "--temperatures", "0", "1"]
    monkeypatch.setattr(sys, "argv", ["draft_vocab.py", *models, *asked, "--out", str(tmp_path / "out.jsonl")])
    bench["draft_vocab"].main()
    lines = lines_of(tmp_path / "out.jsonl")
    parts = ["all", "ids 100", "counts 100", "counts 100 and read"]
    assert [(line["tokens proposed"], line["temperature"]) for line in lines] == [
        (part, temperature) for temperature in (0.0, 1.0) for part in parts
    ]
    for whole, *some in (lines[:4], lines[4:]):
        assert all(one["right"] <= whole["right"] and one["places"] == 11 for one in some)
        assert all(one["draft step over target pass"] < whole["draft step over target pass"] for one in some)
        assert some[1]["right"] <= some[2]["right"]
