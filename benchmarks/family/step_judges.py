"""Judges of steps that learn nothing, beside which `judges.py` measures a learned reward: equations, and chance."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from decimal import Decimal, DivisionByZero, InvalidOperation

from card.family.judges.judge import JudgingVerifier, Mismatch
from card.family.judges.steps import last_of_step, step_ends
from card.text.tokenizer import Tokenizer
from card.tree.nodes import ROOT
from card.tree.verify import Verdict, Verification

_NUMBER = r"-?\d+(?:\.\d+)?"
_EQUATION = re.compile(rf"(?<![\d.*/+-])({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*=\s*(?:<<.*?>>)?({_NUMBER})")
_ALMOST = Decimal("0.01")


def equations_hold(text: str) -> float:
    """Return the share of a text's equations of two numbers that are right; 1 if it has none."""
    found = [_holds(*one.groups()) for one in _EQUATION.finditer(text)]
    return sum(found) / len(found) if found else 1.0


def _holds(left: str, sign: str, right: str, result: str) -> bool:
    a, b = Decimal(left), Decimal(right)
    try:
        value = {"+": a + b, "-": a - b, "*": a * b}.get(sign)
        return abs((a / b if value is None else value) - Decimal(result)) <= _ALMOST
    except (InvalidOperation, DivisionByZero):
        return False


class StepVerifier:
    """Keeps a drafted step if its reward, in [0, 1], is at least 1 - knob. It sees one text at a time."""

    is_exact = False

    def __init__(self, kind: str, knob: float, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        """Make it; ``kind`` is equations or chance, the rest as of `step_ends`."""
        self._reward = {"equations": self._equations, "chance": self._chance}[kind]
        self._knob, self._tokenizer = knob, tokenizer
        self._ends = step_ends(lambda one: str(tokenizer.decode([one])), vocab_size, end_ids)
        self._inner, self._ids = JudgingVerifier(self), list[int]()

    def begin(self) -> None:
        """Forget the text: another one follows."""
        self._ids.clear()

    def decide(self, seen: Verification) -> Verdict:
        """Return the accepted path and the target's own token after it."""
        verdict = self._inner.decide(seen)
        self._ids += [*(seen.offer.tokens[node] for node in verdict.accepted), verdict.next_id]
        return verdict

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate's step stays."""
        offer, node = mismatch.seen.offer, last_of_step(mismatch.seen.offer, mismatch.candidate, self._ends)
        if node is None:
            return False
        step: list[int] = []
        while node != ROOT:
            step.append(offer.tokens[node])
            node = offer.parents[node]
        return self._reward([*self._ids, *reversed(step)]) >= 1.0 - self._knob

    def _equations(self, token_ids: Sequence[int]) -> float:
        return equations_hold(str(self._tokenizer.decode(list(token_ids))))

    def _chance(self, token_ids: Sequence[int]) -> float:
        return random.Random(str(token_ids)).random()
