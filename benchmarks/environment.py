"""What every result line says about where it comes from, and how lines and prompts are read and written."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import card
from card.config import EngineSettings
from card.errors import PromptError, SettingsError
from card.models.inflation import inflate, parse_parameter_count
from card.models.loading import load_model
from card.models.text import encode_chat, encode_prompt

START_TIMEOUT_S = 600.0  # longest time for a drafter to load: other programs may keep the machine busy then
_REPOSITORY = Path(__file__).parents[1]


def describe_run() -> dict[str, Any]:
    """Return the facts of this run: command, commit, versions, machine, and when it began."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], _REPOSITORY), *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {
            "card": card.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": round(os.getloadavg()[0], 2),  # before the run: a busy machine makes poor figures
        },
    }


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as text."""

    text: str
    is_raw: bool = False  # continued as it is, without the chat template

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the token ids. Raises: PromptError for a text that is no prompt."""
        if self.is_raw:
            return encode_prompt(tokenizer, self.text)
        return encode_chat(tokenizer, [{"role": "user", "content": self.text}])


def read_questions(path: Path, limit: int) -> list[Question]:
    """Return the first ``limit`` questions of a file in GSM8K's format; ``"raw": true`` means no chat template.

    Raises: PromptError if it holds none.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        questions = [Question(str(row["question"]), row.get("raw", False) is True) for row in rows[:limit]]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise PromptError(f"{path} cannot be read as JSON lines with a 'question' each: {error!r}") from error
    if not questions:
        raise PromptError(f"{path} gives no question (limit {limit}); give a file with one JSON object a line")
    return questions


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append one line of JSON per result; the folder is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def choose_cores(text: str | None) -> tuple[int, int]:
    """Return the target's core and the drafter's: "0,1" as asked for, or the first and last that may be used.

    Raises: SettingsError if these are not two cores of this process.
    """
    allowed = sorted(os.sched_getaffinity(0))
    try:
        chosen = [int(part) for part in text.split(",")] if text else [allowed[0], allowed[-1]]
    except ValueError:
        chosen = []
    if len(set(chosen)) != 2 or not set(chosen) <= set(allowed):
        raise SettingsError(f"cores must be two different ones of {allowed}, such as 0,1, got {text or chosen}")
    return chosen[0], chosen[1]


def all_cores(text: str | None) -> tuple[int, ...]:
    """Return the cores that all methods share: "0,1" as asked for, or all that may be used.

    Raises: SettingsError if these are not two cores of this process or more.
    """
    allowed = sorted(os.sched_getaffinity(0))
    try:
        chosen = sorted({int(part) for part in text.split(",")}) if text else allowed
    except ValueError:
        chosen = []
    if len(chosen) < 2 or not set(chosen) <= set(allowed):
        raise SettingsError(f"cores must be two or more of {allowed}, such as 0,1, got {text or chosen}")
    return tuple(chosen)


def encode_questions(path: Path, limit: int, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the first ``limit`` questions of a file as token ids. Raises: PromptError."""
    return [question.encode(tokenizer) for question in read_questions(path, limit)]


def load_target(name: str, dtype: str, cost: str | None) -> PreTrainedModel:
    """Return the target, inflated to the price of so many parameters if ``cost`` says so. Raises: CardError."""
    model = load_model(name, dtype=dtype)
    return inflate(model, parse_parameter_count(cost)) if cost else model


def add_common_options(parser: argparse.ArgumentParser, *, has_prompts: bool = True) -> None:
    """Add the options that say on what a benchmark of single requests runs; see `add_model_options`."""
    parser.add_argument("--limit", type=int, default=8, help="how many prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to this file")
    parser.add_argument("--target-cost", help="inflate the target to the price of so many parameters, such as 300M")
    parser.add_argument("--cores", help="the target's core and the drafter's, such as 0,1 (default: first and last)")
    add_model_options(parser, has_prompts=has_prompts)


def add_model_options(parser: argparse.ArgumentParser, *, has_prompts: bool = True) -> None:
    """Add the options that every benchmark has: prompts, how much text, and the pair of models.

    Args:
        has_prompts: False for a benchmark with `workloads`, which take their place.
    """
    defaults = EngineSettings()
    if has_prompts:
        parser.add_argument(
            "--prompts", type=Path, required=True, help="JSON lines with a 'question' each, as in GSM8K"
        )
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens a prompt (default: %(default)s)")
    parser.add_argument("--target", default=defaults.target, help="folder or name (default: %(default)s)")
    parser.add_argument("--draft", default="demo-draft", help="folder or name (default: %(default)s)")
    parser.add_argument("--dtype", default=defaults.dtype, help="auto, float32, bfloat16, ... (default: %(default)s)")


def numbers(text: str) -> list[int]:
    """Return "2,3,4" as whole numbers, for argparse. Raises: ValueError if it is none."""
    return [int(part) for part in text.split(",")]


def _commit() -> str:
    """Return the commit of the working tree, marked if it has changes; "unknown" outside a repository."""
    answers = []
    for question in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", *question], cwd=_REPOSITORY, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        answers.append(done.stdout.strip())
    return answers[0] + ("-dirty" if answers[1] else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
