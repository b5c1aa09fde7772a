"""What is decoded: prompts of one's own, those that are shipped, and what is wrong with them said plainly."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from card.errors import PromptError, SettingsError
from card.models.loading import load_tokenizer
from card.models.text import encode_chat
from tests.benchmarks.scripts import BENCHMARKS
from tests.pair import Pair


def find(bench: dict[str, ModuleType], *options: str) -> dict[str, Path]:
    parser = argparse.ArgumentParser()
    bench["workloads"].add_workload_options(parser)
    found: dict[str, Path] = bench["workloads"].find_workloads(parser.parse_args(options))
    return found


def test_files_are_named_after_themselves_or_as_said_and_come_before_shipped_prompts(
    bench: dict[str, ModuleType],
) -> None:
    found = find(bench, "--workload", "copy-edit,code", "--prompts", "some/gsm8k_test.jsonl", "mine=b.jsonl")
    assert list(found) == ["gsm8k_test", "mine", "copy-edit", "code"]
    assert found["mine"] == Path("b.jsonl") and found["gsm8k_test"] == Path("some/gsm8k_test.jsonl")
    assert found["code"] == BENCHMARKS / "prompts" / "code.jsonl"
    assert list(find(bench, "--workload", "all")) == ["code", "copy-edit"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], r"nothing to decode: give --prompts FILE, or --workload"),
        (["--workload", "poems"], r"unknown workload 'poems'; known: code, copy-edit"),
        (["--prompts", "a/x.jsonl", "b/x.jsonl"], r"two workloads are named 'x'.*NAME=FILE"),
        (["--prompts", "code=x.jsonl", "--workload", "code"], r"two workloads are named 'code'"),
    ],
)
def test_workloads_that_make_no_sense_are_refused(
    bench: dict[str, ModuleType], options: list[str], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        find(bench, *options)


@pytest.mark.parametrize("name", ["code", "copy-edit"])
def test_shipped_prompts_are_distinct_and_fit_the_demo_pair(bench: dict[str, ModuleType], name: str) -> None:
    path = BENCHMARKS / "prompts" / f"{name}.jsonl"
    prompts = bench["environment"].encode_questions(path, 100, load_tokenizer("demo-target"))
    assert 12 <= len(prompts) <= 20 and len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert max(map(len, prompts)) < 512
    assert all(question.is_raw is (name == "copy-edit") for question in bench["environment"].read_questions(path, 100))


def test_a_raw_prompt_is_continued_as_it_is_and_a_question_is_put_into_the_chat_template(
    bench: dict[str, ModuleType], pair: Pair, tmp_path: Path
) -> None:
    path, tokenizer = tmp_path / "prompts.jsonl", load_tokenizer(pair.target)
    rows = [{"question": "the cat sat", "raw": True}, {"question": "the cat sat"}, {"question": "more"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw, chat = bench["environment"].encode_questions(path, 2, tokenizer)
    assert tokenizer.decode(raw) == "the cat sat"
    assert chat == encode_chat(tokenizer, [{"role": "user", "content": "the cat sat"}])


@pytest.mark.parametrize("text", ["", '{"answer": "4"}\n', "[1]\n", "no JSON\n"])
def test_a_file_without_questions_is_refused(bench: dict[str, ModuleType], tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=str(path)):
        bench["environment"].read_questions(path, 3)
