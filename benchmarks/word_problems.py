"""Word problems in GSM8K's form: a question, and a number that answers it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from card.errors import BenchError
from card.text.answers import final_number

INSTRUCTION = "Solve the problem step by step. End with the answer as a single number after ####."


@dataclass(frozen=True, slots=True)
class Item:
    """A question and the number that answers it."""

    question: str
    answer: Decimal

    @property
    def prompt(self) -> str:
        """The question, and what its answer should end with."""
        return f"{self.question}\n\n{INSTRUCTION}"


def read_items(path: Path, limit: int) -> list[Item]:
    """Return the first items of a file. Raises: BenchError if it is not in GSM8K's form, or has none."""
    items = []
    try:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if not line.strip() or len(items) == limit:
                continue
            record = json.loads(line)
            answer = final_number(record["answer"]) if "####" in record["answer"] else None
            if answer is None:
                raise BenchError(f"{path}, line {number}: the answer has no number after ####")
            items.append(Item(str(record["question"]), answer))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is not in GSM8K's form, a question and an answer a line: {error!r}") from error
    if not items:
        raise BenchError(f"{path} has no items; give a file with some, and a --limit of 1 or more")
    return items
