"""The final number of an answer to a word problem, as GSM8K's checkers read it."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def final_number(text: str) -> Decimal | None:
    """Return the first number after the last ####, or else the last number of a text; None if there is none."""
    _, mark, end = text.rpartition("####")
    after = _NUMBER.findall(end) if mark else []
    numbers = after[:1] or _NUMBER.findall(text)[-1:]
    try:
        return Decimal(numbers[0].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None
