"""What other writers than the draft model bring to each text, and how often they are asked for it.

Asking costs Python time for each request and round, and so does each candidate, beside its row. On a text without
repetition that is a loss, so there they are asked ever more seldom. Once a text begins to repeat itself, this is
noticed a few rounds later. Earlier texts say nothing about new ones.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from card.engine.offers import DRAFTER_BIT
from card.engine.policy.modes import TRIAL_SHARE
from card.engine.request import Verified

# Seconds of Python to ask the writers for one request, and to verify candidates of one request. Evidence: 54 and 65 us
# (Zen 4).
REQUEST_S = 8e-5
_FEW = 4  # candidates that a writer is asked for while it does not pay
_NEW_SHARE = 0.1  # weight of a round in the means of a text
_GAIN_SHARE = 0.25  # weight of the last question in the expected gain; also the first expectation, in tokens


@dataclass(slots=True)
class CopiedShare:
    """Means over the rounds of a text in which such writers were asked, or over several texts."""

    num_right: float = 0.0  # leading tokens that they had right
    num_verified: float = 0.0  # candidates of theirs
    missed: float = 1.0  # share of the rounds in which they had none right

    def observe(self, one: Verified) -> None:
        """Take a round of a text."""
        writers = one.offer.writers
        accepted = one.accepted if writers else ()
        num_right = next((n for n, idx in enumerate(accepted) if writers[idx] == DRAFTER_BIT), len(accepted))
        self.num_right += _NEW_SHARE * (num_right - self.num_right)
        self.num_verified += _NEW_SHARE * (sum(bits != DRAFTER_BIT for bits in writers) - self.num_verified)
        self.missed += _NEW_SHARE * ((not num_right) - self.missed)


@dataclass(slots=True)
class _Text:
    """Answers of such writers for one text."""

    asked_at: int = -1  # round
    gain: float = _GAIN_SHARE  # expected net tokens of a question, after the cost of its candidates
    pause: int = 0  # rounds until the next question
    share: CopiedShare = field(default_factory=CopiedShare)


class Copied:
    """Decides how many candidates each such writer is asked for, and knows what they bring to the running texts."""

    def __init__(self) -> None:
        self._round = 0
        self._texts: dict[int, _Text] = {}  # by request
        self.mean = CopiedShare()  # of the running texts
        self.was_asked = False  # any writer, in this round

    def begin(self) -> None:
        """Go on to the next round."""
        self._round += 1
        self.was_asked = False

    def budget(self, request_id: int, most: int) -> int:
        """Return how many candidates each writer is asked for in this round: 0, a few, or ``most``."""
        text = self._texts.get(request_id)
        if text is not None and not self._is_due(text):
            return 0
        self.was_asked = True
        return min(_FEW, most) if text is not None and text.pause else most

    def observe(
        self, verified: Sequence[Verified], seconds: float, *, rate: float, row_s: float, ended: Container[int] = ()
    ) -> None:
        """Learn from a round in which somebody was asked. Texts that ended in it, or are not in it, are forgotten.

        Args:
            seconds: of the round.
            rate: tokens per second reached elsewhere.
            row_s: seconds of a candidate's row.
        """
        price = rate * REQUEST_S
        longest = int(len(verified) * REQUEST_S / (TRIAL_SHARE * seconds)) if seconds else 0
        texts: dict[int, _Text] = {}
        for one in verified:
            text = self._texts.get(one.request_id) or _Text()
            if self._is_due(text):
                text.gain += _GAIN_SHARE * (_gain(one, price, rate * row_s) - text.gain)
                text.pause = 0 if text.gain > 2 * price else min(2 * text.pause or 1, longest)
                text.asked_at = self._round
                text.share.observe(one)
            if one.request_id not in ended:
                texts[one.request_id] = text
        self._texts = texts
        shares, count = [text.share for text in texts.values()] or [CopiedShare()], max(1, len(texts))
        self.mean = CopiedShare(
            sum(share.num_right for share in shares) / count,
            sum(share.num_verified for share in shares) / count,
            sum(share.missed for share in shares) / count,
        )

    def _is_due(self, text: _Text) -> bool:
        return self._round - text.asked_at > text.pause


def _gain(one: Verified, request_price: float, row_price: float) -> float:
    """Return the tokens gained from writers that are asked at times, less the cost of their candidates.

    The draft model is not one of them, nor is a grammar, which is asked in every round.
    """
    theirs = [bits != DRAFTER_BIT and not bits & one.grammar_bit for bits in one.offer.writers]
    num_verified = sum(theirs)
    if not num_verified:
        return 0.0
    return sum(theirs[idx] for idx in one.accepted) - row_price * num_verified - request_price
