"""Prompts to decode: published data sets from files or from the hub, shipped prompts, the user's own.

Nothing is fetched unless it is asked for. Formats: GSM8K (Cobbe et al. 2021, arXiv:2110.14168), MGSM (Shi et al. 2022,
arXiv:2210.03057), MT-bench (Zheng et al. 2023, arXiv:2306.05685), HumanEval (Chen et al. 2021, arXiv:2107.03374), MBPP
(Austin et al. 2021, arXiv:2108.07732) and Spec-Bench (Xia et al. 2024, arXiv:2401.07851).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from card.errors import BenchError, SettingsError
from card.text.answers import final_number
from card.text.lines import file_lines
from card.text.prompts import encode_chat, encode_prompt
from card.text.tokenizer import Tokenizer
from card.tools.bench.row_names import PUBLISHED, shipped, shipped_folder

HUB = "hub:"
_PLAIN = "prompts"


@dataclass(frozen=True, slots=True)
class DatasetQuestion:
    """One prompt: what the user says, turn by turn."""

    turns: tuple[str, ...]
    is_raw: bool = False  # continued as it is, without the chat template
    answer: Decimal | None = field(default=None, compare=False)  # the number that solves it, if any

    def encode(self, tokenizer: Tokenizer, answers: Sequence[str] = ()) -> list[int]:
        """Return the token ids of the turn after these answers, the conversation so far before it.

        Raises: PromptError for a text that is no prompt, or a tokenizer without a chat template.
        """
        said = self.turns[: len(answers) + 1]
        if self.is_raw:
            lines = [line for pair in zip(said, answers, strict=False) for line in pair]
            return encode_prompt(tokenizer, "\n".join([*lines, said[-1]]))
        messages = [{"role": "user", "content": said[0]}]
        for answer, turn in zip(answers, said[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return encode_chat(tokenizer, messages)


@dataclass(frozen=True, slots=True)
class Dataset:
    """The prompts of one workload."""

    name: str
    source: str  # file, or place on the hub
    questions: tuple[DatasetQuestion, ...]

    @property
    def sha256(self) -> str:
        """Checksum of all prompts, by which a resumed run recognises them."""
        facts = [[question.turns, question.is_raw] for question in self.questions]
        return hashlib.sha256(json.dumps(facts, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Format:
    """A published format: the fields of each record, and the prompt made of them."""

    needs: Mapping[str, type]
    question: Callable[[Mapping[str, Any]], DatasetQuestion]
    hub: str = ""  # where the set is published there: OWNER/REPOSITORY/FILE
    num_turns: range = range(1, 1 << 31)


def _mbpp_question(record: Mapping[str, Any]) -> DatasetQuestion:
    tests = "\n".join(map(str, record["test_list"]))  # the wording is that of the paper, figure 1, without its examples
    return DatasetQuestion((f"{record['text']} Your code should pass these tests:\n\n{tests}",))


def _turns(record: Mapping[str, Any]) -> DatasetQuestion:
    return DatasetQuestion(tuple(record["turns"]))


def _single_turn(record: Mapping[str, Any]) -> DatasetQuestion:
    answer = record.get("answer")
    number = final_number(answer) if isinstance(answer, str) else None
    return DatasetQuestion((record["question"],), record.get("raw") is True, number)


_TEXT_QUESTION = {"question": str, "answer": str}
_CHAT = {"question_id": int, "category": str, "turns": list}
_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "gsm8k": _Format(_TEXT_QUESTION, _single_turn, "openai/gsm8k/main/test-00000-of-00001.parquet"),
        "mgsm": _Format(_TEXT_QUESTION, _single_turn, "juletxara/mgsm/mgsm_en.tsv"),
        "mt-bench": _Format(_CHAT, _turns, "HuggingFaceH4/mt_bench_prompts/raw/question.jsonl", range(2, 3)),
        "humaneval": _Format(
            {"task_id": str, "prompt": str, "entry_point": str},
            lambda record: DatasetQuestion((record["prompt"],), is_raw=True),
            "openai/openai_humaneval/openai_humaneval/test-00000-of-00001.parquet",
        ),
        "mbpp": _Format(
            {"task_id": int, "text": str, "test_list": list},
            _mbpp_question,
            "google-research-datasets/mbpp/full/test-00000-of-00001.parquet",
        ),
        "spec-bench": _Format(_CHAT, _turns),
        _PLAIN: _Format({"question": str}, _single_turn),
    }
)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """One data set as the user asked for it."""

    name: str
    format: str
    source: str  # a file, or hub:OWNER/REPOSITORY/FILE


def parse_spec(text: str, *, from_hub: bool = False) -> DataSpec:
    """Return the data set that ``--data`` names.

    Args:
        text: NAME of shipped prompts; NAME=FILE, in the format of that name, or else a question a line; FILE, named
            after itself; hub:NAME of a published set; NAME=hub:OWNER/REPOSITORY/FILE.
        from_hub: a published set's bare NAME means hub:NAME.
    Raises: SettingsError for any other name.
    """
    name, is_named, source = text.partition("=")
    if is_named:
        if source.startswith(HUB) and source.count("/") < 2:
            raise SettingsError(f"a file on the hub is {HUB}OWNER/REPOSITORY/FILE, got {source!r}")
        return DataSpec(name, name if name in PUBLISHED else _PLAIN, source)
    if text.startswith(HUB) or (from_hub and text in PUBLISHED):
        return _hub_spec(text.removeprefix(HUB))
    if text in shipped():
        return DataSpec(text, _PLAIN, str(shipped_folder() / f"{text}.jsonl"))
    if text in PUBLISHED:
        hub = f", or {HUB}{text} to fetch it" if _FORMATS[text].hub else ""
        raise SettingsError(f"{text} does not come with the package: give {text}=FILE in its published format{hub}")
    if not Path(text).suffix:
        known = ", ".join(shipped())
        raise SettingsError(
            f"unknown data {text!r}: name shipped prompts ({known}), a published set as NAME=FILE or {HUB}NAME "
            f"({', '.join(PUBLISHED)}), or a file of prompts"
        )
    return DataSpec(Path(text).stem, _PLAIN, text)


def read_datasets(specs: Sequence[DataSpec], *, limit: int | None, is_raw: bool = False) -> list[Dataset]:
    """Return the data sets, each cut to its first ``limit`` prompts.

    Args:
        is_raw: all prompts are continued as they are, for models without a chat template.
    Raises: SettingsError for two of one name; BenchError, with file and line, for a record in another format.
    """
    found: dict[str, Dataset] = {}
    for spec in specs:
        if spec.name in found:
            raise SettingsError(f"two data sets are named {spec.name!r}; give one of them another name with NAME=FILE")
        questions = tuple(islice(_questions(spec), limit))
        if not questions:
            raise BenchError(f"{spec.source} holds no prompt; expected {_expected(spec.format)}")
        if is_raw:
            questions = tuple(replace(question, is_raw=True) for question in questions)
        is_shipped = Path(spec.source).parent == shipped_folder()  # results do not name this installation's folder
        found[spec.name] = Dataset(spec.name, "shipped" if is_shipped else spec.source, questions)
    return list(found.values())


# ---- inside ----------------------------------------------------------------------------------------------------------


def _hub_spec(name: str) -> DataSpec:
    place = _FORMATS[name].hub if name in PUBLISHED else ""
    if not place:
        known = ", ".join(known for known in PUBLISHED if _FORMATS[known].hub)
        raise SettingsError(
            f"{name!r} has no known place on the hub (known: {known}); give NAME={HUB}OWNER/REPOSITORY/FILE, or a file"
        )
    return DataSpec(name, name, f"{HUB}{place}")


def _questions(spec: DataSpec) -> Iterator[DatasetQuestion]:
    wanted = _FORMATS[spec.format]
    for line, record in _records(spec):
        for name, kind in wanted.needs.items():
            value = record.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                got = f"{name!r} is {value!r:.40}" if name in record else f"keys {', '.join(record) or 'none'}"
                raise _wrong(spec, line, got)
        if "turns" in wanted.needs:
            turns = record["turns"]
            if len(turns) not in wanted.num_turns or not all(isinstance(turn, str) for turn in turns):
                raise _wrong(spec, line, f"'turns' is {turns!r:.60}")
        question = wanted.question(record)
        if not all(turn.strip() for turn in question.turns):
            raise _wrong(spec, line, "an empty text")
        yield question


def _wrong(spec: DataSpec, line: int, got: str) -> BenchError:
    return BenchError(f"{spec.source}, line {line}: expected {_expected(spec.format)}, got {got}")


def _expected(name: str) -> str:
    words = {str: "text", int: "a whole number", list: "a list of texts"}
    needs = ", ".join(f"{field!r} ({words[kind]})" for field, kind in _FORMATS[name].needs.items())
    what = "a prompt" if name == _PLAIN else f"a problem of {name}"
    count = ", two 'turns'" if name == "mt-bench" else ""
    return f"{what} with {needs}{count}"


def _records(spec: DataSpec) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of a file with the number of their line (of their row in a Parquet file)."""
    path = _fetch(spec.source) if spec.source.startswith(HUB) else Path(spec.source)
    try:
        if path.suffix == ".parquet":
            yield from enumerate(_parquet_rows(path), 1)
        elif path.suffix == ".tsv":
            yield from _tsv_rows(spec, path)
        elif path.suffix == ".txt" and spec.format == _PLAIN:
            lines = enumerate(file_lines(path), 1)
            yield from ((number, {"question": line}) for number, line in lines if line.strip())
        else:
            yield from _json_rows(spec, path)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise BenchError(f"{spec.source} cannot be read: {error}") from error


def _json_rows(spec: DataSpec, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise _wrong(spec, number, f"no JSON ({error})") from error
        if not isinstance(record, dict):
            raise _wrong(spec, number, f"{line.strip()!r:.40}")
        yield number, record


def _tsv_rows(spec: DataSpec, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield question and answer of each line, as MGSM publishes them."""
    for number, line in enumerate(file_lines(path), 1):
        cells = line.split("\t")
        if len(cells) != 2:
            raise _wrong(spec, number, f"{len(cells)} columns instead of question and answer")
        yield number, {"question": cells[0], "answer": cells[1]}


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise BenchError(
            f"{path.name} is a Parquet file, which needs pyarrow: pip install pyarrow, or give the set as JSON lines"
        ) from error
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def _fetch(source: str) -> Path:
    """Return the local copy of a file on the hub; it is downloaded if it is not in the cache."""
    owner, repository, filename = source.removeprefix(HUB).split("/", 2)
    try:
        path = huggingface_hub.hf_hub_download(f"{owner}/{repository}", filename, repo_type="dataset")
    except HFValidationError as error:
        raise SettingsError(f"a file on the hub is {HUB}OWNER/REPOSITORY/FILE, got {source!r}: {error}") from error
    except LocalEntryNotFoundError as error:
        raise BenchError(
            f"{source} is not in the local cache, and the hub cannot be reached; go online, or give NAME=FILE"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise BenchError(f"{source} cannot be fetched: {error}; give NAME=FILE instead") from error
    return Path(path)
