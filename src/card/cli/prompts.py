"""Files of prompts: a prompt on each line, or JSON lines with a "question" each."""

from __future__ import annotations

import json
from pathlib import Path

from card.errors import PromptError


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts of a UTF-8 file; its lines are JSON if it is named so, or its first one begins so.

    Raises: PromptError if there are none, or one cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise PromptError(f"{path} is not valid UTF-8; convert it first") from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}; name another file") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"{path} holds no prompts; put one on each line")
    if path.suffix != ".jsonl" and not numbered[0][1].startswith("{"):
        return tuple(line for _, line in numbered)
    return tuple(_question(path, number, line) for number, line in numbered)


def _question(path: Path, number: int, line: str) -> str:
    try:
        question = json.loads(line)["question"]
    except (ValueError, KeyError, TypeError, RecursionError):
        question = None
    if not isinstance(question, str) or not question.strip():
        raise PromptError(f'{path}, line {number}: must be a JSON object with "question", a text; got {line[:60]!r}')
    return question
