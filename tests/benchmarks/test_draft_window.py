"""The script of draft windows cuts prompts, answers greedily, and counts the tokens on which a draft model agrees."""

from __future__ import annotations

import json

import pytest

from card.errors import BenchError
from tests.benchmarks.scripts import lines_of
from tests.toy import TableModel


@pytest.mark.parametrize(
    ("first", "last", "kept"), [(1, 2, [0, 4, 5]), (2, 4, [0, 1, 2, 3, 4, 5]), (4, 16, [0, 1, 2, 3, 4, 5])]
)
def test_a_window_is_the_first_and_the_last_tokens(bench, first, last, kept):
    assert bench["draft_window"].windowed(range(6), first, last) == kept


def test_a_model_agrees_with_its_own_answer_behind_a_window_as_wide_as_it_sees(bench):
    script, model = bench["draft_window"], TableModel(1, max_model_len=1024)
    prompt = [n % 7 for n in range(700)]
    answer = script.answer_of(model, prompt, 12, ())
    assert len(answer) == script.num_agreed(model, prompt, answer) == 12
    assert script.num_agreed(model, script.windowed(prompt, 1, 2), answer) == 12
    assert script.num_agreed(TableModel(2, max_model_len=1024), prompt, answer) < 12
    assert model.num_open == 0


def test_an_answer_stops_at_its_end(bench):
    script, model = bench["draft_window"], TableModel(1)
    answer = script.answer_of(model, [1, 2, 3], 12, ())
    assert script.answer_of(model, [1, 2, 3], 12, answer[3:4]) == answer[: answer.index(answer[3]) + 1]


def test_a_run_writes_a_line_for_each_prompt(bench, pair, tmp_path, monkeypatch):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"asked": f"What is {n}?", "told": "That."}) for n in range(40)))
    command = ["draft_window.py", pair.target, pair.draft, "--texts", f"a={texts}:asked,told", "--chars", "40"]
    sizes = ["--first", "1", "--last", "4", "8", "--answer-tokens", "4", "--max-model-len", "256"]
    monkeypatch.setattr("sys.argv", [*command, *sizes, "--out", str(tmp_path / "out.jsonl")])
    bench["draft_window"].main()
    (line,) = lines_of(tmp_path / "out.jsonl")
    assert line["text"] == "a" and line["agreed"].keys() == {"1+4", "1+8"}
    assert {"machine", "command", "commit"} <= line.keys()


def test_too_few_texts_for_a_prompt_are_told(bench, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"asked": "a", "told": "b"}')
    with pytest.raises(BenchError, match="fewer than 40 characters"):
        bench["draft_window"].messages(f"a={tmp_path / 'texts.jsonl'}:asked,told", 40, 0)
