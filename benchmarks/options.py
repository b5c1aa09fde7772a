"""What the scripts here have in common: options, prompts, and the lines of those that write no bench file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from card.backends.transformers.loading import load_model
from card.config import EngineSettings, parse_parameter_count
from card.errors import BenchError, SettingsError
from card.models.inflation import inflate
from card.tools.bench import environment
from card.tools.bench.datasets import Dataset, DataSpec, read_datasets


@cache
def _facts() -> environment.Environment:
    return environment.describe_run()


def describe_run() -> dict[str, Any]:
    """Return the facts of this run for a line of its results, as they are when it is first asked.

    The lines that a run appends to a committed file would make its later ones look dirty.
    """
    facts = _facts()
    return {
        "started": facts.date,
        "command": facts.command,
        "commit": facts.commit,
        "versions": facts.versions,
        "machine": facts.machine,
    }


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append one line of JSON per result; the folder is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_lines(path: Path, benchmark: str) -> list[dict[str, Any]]:
    """Return the lines that a script wrote. Raises: BenchError if they are not there, or another one's."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        others = {line["benchmark"] for line in lines} - {benchmark}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} holds no lines of {benchmark}.py: {error!r}") from error
    if others or not lines:
        raise BenchError(f"{path} holds {f'lines of {min(others)}' if others else 'no lines'}, not of {benchmark}.py")
    return lines


def prompt_set(path: Path, limit: int) -> Dataset:
    """Return the first prompts of a file as a data set named after it. Raises: BenchError."""
    return read_datasets([DataSpec(path.stem, "prompts", str(path))], limit=limit)[0]


def encode_prompts(path: Path, limit: int, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the first prompts of a file as token ids. Raises: BenchError, PromptError."""
    return [question.encode(tokenizer) for question in prompt_set(path, limit).questions]


def load_target(name: str, dtype: str, cost: str | None) -> PreTrainedModel:
    """Return the target, inflated to the price of so many parameters if ``cost`` says so. Raises: CardError."""
    model = load_model(name, dtype=dtype)
    return inflate(model, parse_parameter_count(cost)) if cost else model


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has: prompts, how much text, and the pair of models."""
    defaults = EngineSettings()
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a 'question' each, as in GSM8K")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens a prompt (default: %(default)s)")
    parser.add_argument("--target", default=defaults.target, help="folder or name (default: %(default)s)")
    parser.add_argument("--draft", default="demo-draft", help="folder or name (default: %(default)s)")
    parser.add_argument("--dtype", default=defaults.dtype, help="auto, float32, bfloat16, ... (default: %(default)s)")


def questions_of(path: Path, limit: int) -> list[str]:
    """Return the first questions of a file. Raises: BenchError."""
    return [question.turns[0] for question in prompt_set(path, limit).questions]


def numbers(text: str) -> list[int]:
    """Return "2,3,4" as whole numbers. Raises: SettingsError if it is none."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(f"expected whole numbers such as 2 or 2,3,4, got {text!r}") from None
