"""Each loader reads its published format and refuses another file with name, line and what was expected."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from card.errors import BenchError, SettingsError
from card.models.loading import load_tokenizer
from card.text.prompts import encode_chat
from card.tools.bench.datasets import Dataset, DatasetQuestion, DataSpec, parse_spec, read_datasets
from card.tools.bench.row_names import PUBLISHED, shipped
from tests.pair import Pair

# One record of each published format, made up here.
RECORDS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Tom has 3 apples. How many?", "answer": "He has <<3=3>>3.\n#### 3"},
    "mgsm": {"question": "Tom hat 3 Äpfel. Wie viele?", "answer": "3"},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Now shorter."]},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "test": "",
        "canonical_solution": "",
    },
    "mbpp": {"task_id": 1, "text": "Write f.", "code": "def f(): ...", "test_list": ["assert f(1)", "assert f(2)"]},
    "spec-bench": {"question_id": 161, "category": "rag", "turns": ["Who wrote it?"]},
    "prompts": {"question": "Repeat this:", "raw": True},
}
QUESTIONS = {
    "gsm8k": DatasetQuestion(("Tom has 3 apples. How many?",)),
    "mgsm": DatasetQuestion(("Tom hat 3 Äpfel. Wie viele?",)),
    "mt-bench": DatasetQuestion(("Write a post.", "Now shorter.")),
    "humaneval": DatasetQuestion(("def f(x):\n",), is_raw=True),
    "mbpp": DatasetQuestion(("Write f. Your code should pass these tests:\n\nassert f(1)\nassert f(2)",)),
    "spec-bench": DatasetQuestion(("Who wrote it?",)),
    "prompts": DatasetQuestion(("Repeat this:",), is_raw=True),
}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def read(name: str, path: Path, limit: int | None = None) -> Dataset:
    (found,) = read_datasets([parse_spec(f"{name}={path}")], limit=limit)
    return found


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_ends_of_lines_and_a_byte_order_mark_are_no_part_of_a_question(tmp_path: Path, ends: str) -> None:
    asked = "a\u2028b\x85c", "d\x0ce"
    files = {
        "prompts.txt": asked,
        "prompts.jsonl": [json.dumps({"question": one}, ensure_ascii=False) for one in asked],
        "mgsm.tsv": [f"{one}\t3" for one in asked],
    }
    for name, lines in files.items():
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + "".join(line + ends for line in lines).encode())
        assert read(path.stem, path).questions == tuple(DatasetQuestion((one,)) for one in asked), name


@pytest.mark.parametrize(("name", "answer"), [("gsm8k", "3"), ("mgsm", "3"), ("prompts", None), ("mbpp", None)])
def test_a_word_problem_brings_its_answer(tmp_path: Path, name: str, answer: str | None) -> None:
    (question,) = read(name, write(tmp_path / "set.jsonl", RECORDS[name])).questions
    assert question.answer == (None if answer is None else Decimal(answer))


def test_every_published_set_is_tested_here() -> None:
    assert {*PUBLISHED, "prompts"} == RECORDS.keys() == QUESTIONS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_a_published_file_becomes_prompts(name: str, tmp_path: Path) -> None:
    found = read(name, write(tmp_path / "x.jsonl", RECORDS[name], RECORDS[name]))
    assert found.name == name and found.questions == (QUESTIONS[name],) * 2
    assert read(name, tmp_path / "x.jsonl", limit=1).questions == (QUESTIONS[name],)


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_of_another_format_is_refused_with_its_line_and_what_was_expected(name: str, tmp_path: Path) -> None:
    for field in ("question", "turns", "prompt", "text"):
        if field in RECORDS[name]:
            break
    wrong = {key: value for key, value in RECORDS[name].items() if key != field}
    path = write(tmp_path / "x.jsonl", RECORDS[name], wrong)
    with pytest.raises(BenchError, match=rf"x\.jsonl, line 2: expected .*'{field}'.*got keys") as error:
        read(name, path)
    assert name in str(error.value) or name == "prompts"
    write(path, {**RECORDS[name], field: 7})
    with pytest.raises(BenchError, match=rf"line 1: expected .*got '{field}' is 7"):
        read(name, path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no prompt; expected a problem of gsm8k with 'question'"),
        ("no JSON\n", "line 1: expected a problem of gsm8k .*got no JSON"),
        ("\n[1]\n", r"line 2: expected .*got '\[1\]'"),
        ('{"question": " ", "answer": ""}\n', "line 1: expected .*got an empty text"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path: Path, text: str | bytes, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BenchError, match=reason):
        read("gsm8k", path)
    with pytest.raises(BenchError, match="cannot be read"):
        read("gsm8k", tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("name", "turns"), [("mt-bench", ["one"]), ("mt-bench", ["a", 2]), ("spec-bench", []), ("spec-bench", [None])]
)
def test_turns_must_be_texts_and_two_in_mt_bench(name: str, turns: list[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {**RECORDS[name], "turns": turns})
    with pytest.raises(BenchError, match=r"line 1: expected .*got 'turns' is"):
        read(name, path)


def test_mgsm_is_read_as_published_with_a_tab_between_question_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "mgsm_de.tsv"
    path.write_text('Wie "viele"?\t3\nWas nun?\t1,200\n', "utf-8")
    assert read("mgsm", path).questions == (DatasetQuestion(('Wie "viele"?',)), DatasetQuestion(("Was nun?",)))
    path.write_text("Wie viele?\t3\nohne Antwort\n", "utf-8")
    with pytest.raises(
        BenchError, match=r"mgsm_de\.tsv, line 2: expected .*got 1 columns instead of question and answer"
    ):
        read("mgsm", path)


def test_compressed_files_and_plain_text_are_read(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(RECORDS["humaneval"]).encode()))
    assert read("humaneval", path).questions == (QUESTIONS["humaneval"],)
    text = tmp_path / "mine.txt"
    text.write_text("one\n\ntwo\n")
    assert read("mine", text).questions == (DatasetQuestion(("one",)), DatasetQuestion(("two",)))


def test_without_pyarrow_a_parquet_file_is_refused_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("card.tools.bench.datasets.import_module", missing)
    with pytest.raises(BenchError, match="needs pyarrow: pip install pyarrow, or give the set as JSON lines"):
        read("gsm8k", tmp_path / "x.parquet")


def test_rows_of_a_parquet_file_are_records(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([RECORDS["mbpp"]]), tmp_path / "x.parquet")
    assert read("mbpp", tmp_path / "x.parquet").questions == (QUESTIONS["mbpp"],)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """A hub that has one file for everything and notes what was asked for."""
    asked: list[tuple[str, str]] = []
    write(tmp_path / "question.jsonl", RECORDS["mt-bench"])

    def download(repository: str, filename: str, *, repo_type: str) -> str:
        assert repo_type == "dataset"
        asked.append((repository, filename))
        return str(tmp_path / "question.jsonl")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_the_hub_is_asked_only_when_told_to(hub: list[tuple[str, str]], tmp_path: Path) -> None:
    read("mt-bench", tmp_path / "question.jsonl")
    read_datasets([parse_spec(name) for name in shipped()], limit=1)
    with pytest.raises(SettingsError, match=r"mt-bench does not come with the package.*mt-bench=FILE.*hub:mt-bench"):
        parse_spec("mt-bench")
    assert hub == []
    for spec in (
        parse_spec("hub:mt-bench"),
        parse_spec("mt-bench", from_hub=True),
        parse_spec("mt-bench=hub:HuggingFaceH4/mt_bench_prompts/raw/question.jsonl"),
    ):
        (found,) = read_datasets([spec], limit=None)
        assert found.name == "mt-bench" and found.questions == (QUESTIONS["mt-bench"],)
        assert found.source == "hub:HuggingFaceH4/mt_bench_prompts/raw/question.jsonl"
    assert hub == [("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")] * 3


def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(BenchError, match=r"hub:juletxara/mgsm/mgsm_en.tsv is not in the local cache.*give NAME=FILE"):
        read_datasets([parse_spec("hub:mgsm")], limit=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("poems", r"unknown data 'poems': name shipped prompts \(code, copy-edit, questions\)"),
        ("hub:poems", r"'poems' has no known place on the hub"),
        ("hub:spec-bench", r"'spec-bench' has no known place on the hub"),
        ("x=hub:one/two", r"a file on the hub is hub:OWNER/REPOSITORY/FILE"),
    ],
)
def test_data_that_does_not_exist_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        parse_spec(text)


def test_sets_are_named_after_the_file_or_as_said_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    assert parse_spec("some/mine.jsonl") == DataSpec("mine", "prompts", "some/mine.jsonl")
    assert parse_spec("gsm8k=a.jsonl").format == "gsm8k" and parse_spec("other=a.jsonl").format == "prompts"
    path = write(tmp_path / "x.jsonl", RECORDS["prompts"])
    with pytest.raises(SettingsError, match="two data sets are named 'x'"):
        read_datasets([parse_spec(str(path)), parse_spec(f"x={path}")], limit=1)


@pytest.mark.parametrize("name", ["code", "copy-edit", "questions"])
def test_shipped_prompts_are_distinct_and_fit_the_demo_pair(name: str) -> None:
    assert name in shipped()
    (found,) = read_datasets([parse_spec(name)], limit=None)
    tokenizer = load_tokenizer("demo-target")
    prompts = [question.encode(tokenizer) for question in found.questions]
    assert 12 <= len(prompts) <= 20 and len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert max(map(len, prompts)) < 512 and found.source == "shipped"
    assert all(question.is_raw is (name == "copy-edit") for question in found.questions)


def test_a_raw_prompt_is_continued_as_it_is_and_a_question_is_put_into_the_chat_template(
    pair: Pair, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(pair.target)
    path = write(tmp_path / "x.jsonl", {"question": "the cat sat", "raw": True}, {"question": "the cat sat"})
    raw, chat = read_datasets([parse_spec(str(path))], limit=5)[0].questions
    assert tokenizer.decode(raw.encode(tokenizer)) == "the cat sat"
    assert chat.encode(tokenizer) == encode_chat(tokenizer, [{"role": "user", "content": "the cat sat"}])
    (all_raw,) = read_datasets([parse_spec(str(path))], limit=None, is_raw=True)
    assert {question.is_raw for question in all_raw.questions} == {True}


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_later_turn_stands_behind_the_answers_before_it(pair: Pair, is_raw: bool) -> None:
    tokenizer = load_tokenizer(pair.target)
    question = DatasetQuestion(("one", "two", "three"), is_raw=is_raw)
    second = tokenizer.decode(question.encode(tokenizer, ["uno"]))
    third = tokenizer.decode(question.encode(tokenizer, ["uno", "due"]))
    if is_raw:
        assert (second, third) == ("one\nuno\ntwo", "one\nuno\ntwo\ndue\nthree")
    else:
        assert third.startswith(second.removesuffix("assistant: ")) and third.endswith(
            "user: three<|turn|>\nassistant: "
        )


def test_the_checksum_tells_other_prompts() -> None:
    one, other = DatasetQuestion(("a", "b")), DatasetQuestion(("a", "b"), is_raw=True)
    sums: Callable[..., str] = lambda *questions: Dataset("x", "y", questions).sha256  # noqa: E731
    assert sums(one) == sums(DatasetQuestion(("a", "b"))) != sums(other)
    assert len({sums(one), sums(other), sums(one, one), sums(DatasetQuestion(("ab",)))}) == 4
