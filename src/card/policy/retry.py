"""Second chances for drafting: rounds without it teach nothing about it, so some rounds draft again after a pause.

Where nothing is drafted, no candidate is seen and no drafter is timed. So an unlucky beginning, or costs measured on a
busy machine, would never be found out. Each try doubles the pause, up to the memory of all that is learnt. Rounds that
draft without being tries shorten it again.
"""

from __future__ import annotations

from card.policy.cost import DISCOUNT
from card.policy.schedule import REVIEW_ROUNDS

# Rounds without drafting before the first try, as often as the time of a round fits into what the drafter takes to read
# the texts, and once more. Evidence: a good draft model that began badly has 1.60 times plain decoding's speed in the
# gate, and 1.34 without tries; an adversarial one costs 1 % more (docs/policy.md).
RETRY_ROUNDS = 16


class Retry:
    """Says which rounds are to draft although that is not believed to pay."""

    def __init__(self) -> None:
        """Begin without a try."""
        self._idle_rounds = 0
        self._pause = float(RETRY_ROUNDS)
        self._rounds_left = 0

    @property
    def is_on(self) -> bool:
        """True in the rounds of a try."""
        return self._rounds_left > 0

    def begin(self, reading_rounds: float) -> None:
        """Begin a try of `REVIEW_ROUNDS` if one is due.

        Args:
            reading_rounds: time in which the drafter reads the texts while the target waits, in rounds.
        """
        if not self.is_on and self._idle_rounds >= self._pause * (1 + reading_rounds):
            self._rounds_left = REVIEW_ROUNDS
            self._pause = min(2 * self._pause, 1 / (1 - DISCOUNT))

    def observe(self, *, has_drafted: bool) -> None:
        """Count a round.

        Args:
            has_drafted: it showed candidates of the draft model, or what they cost.
        """
        if self.is_on:
            self._rounds_left -= 1
            self._idle_rounds = 0
        elif has_drafted:
            self._pause = max(self._pause - 1, RETRY_ROUNDS)
            self._idle_rounds = 0
        else:
            self._idle_rounds += 1
