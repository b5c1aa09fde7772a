"""Rewards rate an answer so far: (question, text) to a number in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, DivisionByZero, InvalidOperation, localcontext

from card.text.answers import final_number

Reward = Callable[[str, str], float]
"""(question, answer so far with the step) -> how good it is, in [0, 1]."""

_EQUATION = re.compile(
    r"<<([-+*/().\d\s]+)=\s*(-?[\d.]+)>>|(?<![\d.*/+-])(-?[\d.]+)\s*([-+*/])\s*([\d.]+)\s*=\s*(-?[\d.]+)"
)
_ALMOST = Decimal("0.01")


class SolutionReward:
    """Check an answer against a known solution: for training, and for the oracle's bound.

    The reward is the share of correct results. An equation is correct if it holds and is in the solution; the number
    after ####, if any, must be the solution's.
    """

    def __init__(self, solutions: Mapping[str, str]) -> None:
        """Take the solution of each question, in GSM8K's form."""
        self._solutions = solutions

    def __call__(self, question: str, answer: str) -> float:
        """Return the share of correct results; 1 if the answer has none yet."""
        solution = self._solutions[question]
        known = {_result(found) for found in _EQUATION.finditer(solution)}
        checks = [_holds(found) and (not known or _result(found) in known) for found in _EQUATION.finditer(answer)]
        if "####" in answer:
            checks.append(final_number(answer) == final_number(solution))
        return sum(checks) / len(checks) if checks else 1.0


def equations_hold(question: str, answer: str) -> float:
    """Return the share of an answer's equations that are correct, such as 3*4=12 or <<3*4=12>>; 1 if it has none.

    It checks only arithmetic: a correct equation may have nothing to do with the question.
    """
    checked = [_holds(found) for found in _EQUATION.finditer(answer)]
    return sum(checked) / len(checked) if checked else 1.0


def _holds(found: re.Match[str]) -> bool:
    parts = re.fullmatch(r"\s*(-?[\d.]+)\s*([-+*/])\s*(-?[\d.]+)\s*", found[1]) if found[1] else None
    if found[1] and parts is None:
        return True  # several operations: not judged
    left, sign, right = parts.groups() if parts else found.group(3, 4, 5)
    try:
        with localcontext() as context:
            context.prec = 28
            a, b, result = Decimal(left), Decimal(right), Decimal(found[2] or found[6])
            value = {"+": a + b, "-": a - b, "*": a * b}.get(sign)
            return abs((a / b if value is None else value) - result) <= _ALMOST
    except (InvalidOperation, DivisionByZero):
        return False


def _result(found: re.Match[str]) -> Decimal | None:
    try:
        return Decimal(found[2] or found[6]).normalize()
    except InvalidOperation:
        return None
