"""Frequency of questions to local writers: every round if their candidates pay, rarely if they do not.

Asking costs Python time for each request and round, and so does each candidate, beside its row. On a text without
repetition that is a loss. Once a text begins to repeat itself, this is noticed a few rounds later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from card.engine.offers import DRAFTER_BIT
from card.engine.policy.cost import REQUEST_S
from card.engine.policy.modes import TRIAL_SHARE
from card.engine.request import Verified

_FEW = 4  # candidates that a writer is asked for while it does not pay
_NEW_SHARE = 0.25  # weight of the last question in the expected gain; also the first expectation, in tokens


@dataclass(slots=True)
class _Expectation:
    """The expected gain of asking for candidates of one request."""

    asked_at: int  # round
    gain: float  # expected net tokens of a question, after the cost of its candidates
    pause: int = 0  # rounds until the next question


class Asking:
    """Decides how many candidates each local writer is asked for in a round."""

    def __init__(self) -> None:
        self._round = 0
        self._expected: dict[int, _Expectation] = {}
        self.was_asked = False  # any writer, in this round

    def begin(self) -> None:
        """Go on to the next round."""
        self._round += 1
        self.was_asked = False

    def budget(self, request_id: int, most: int) -> int:
        """Return how many candidates each writer is asked for in this round: 0, a few, or ``most``."""
        asked = self._expected.get(request_id)
        if asked is not None and self._round - asked.asked_at <= asked.pause:
            return 0
        self.was_asked = True
        return min(_FEW, most) if asked is not None and asked.pause else most

    def observe(self, verified: Sequence[Verified], seconds: float, *, rate: float, row_s: float) -> None:
        """Learn from a round's verifications for which requests asking pays.

        Args:
            seconds: of the round.
            rate: tokens per second reached elsewhere.
            row_s: seconds of a candidate's row.
        """
        price = rate * REQUEST_S
        longest = int(len(verified) * REQUEST_S / (TRIAL_SHARE * seconds)) if seconds else 0
        asked: dict[int, _Expectation] = {}
        for one in verified:
            known = self._expected.get(one.request_id)
            if known is None or self._round - known.asked_at > known.pause:
                gain, pause = (_NEW_SHARE, 0) if known is None else (known.gain, known.pause)
                gain += _NEW_SHARE * (_gain(one, price, rate * row_s) - gain)
                known = _Expectation(self._round, gain, 0 if gain > 2 * price else min(2 * pause or 1, longest))
            asked[one.request_id] = known
        self._expected = asked


def _gain(one: Verified, request_price: float, row_price: float) -> float:
    """Return the tokens gained from writers that are asked at times, less the cost of their candidates.

    The draft model is not one of them, nor is a grammar, which is asked in every round.
    """
    theirs = [bits != DRAFTER_BIT and not bits & one.grammar_bit for bits in one.offer.writers]
    num_verified = sum(theirs)
    if not num_verified:
        return 0.0
    return sum(theirs[idx] for idx in one.accepted) - row_price * num_verified - request_price
