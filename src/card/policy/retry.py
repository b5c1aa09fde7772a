"""Second chances for drafting: rounds without it teach nothing about it, so some rounds draft again after a pause.

Where nothing is drafted, no candidate is seen and no drafter is timed. So an unlucky beginning, or costs measured on a
busy machine, would never be found out. Each try doubles the pause, up to the memory of all that is learnt. Rounds that
draft without being tries shorten it again.
"""

from __future__ import annotations

from card.policy.cost import DISCOUNT
from card.policy.schedule import REVIEW_ROUNDS

# Rounds without drafting before the first try, of one request whose text the drafter reads in no time. Evidence: in the
# gate a good draft model that began badly has 1.55 times the speed of plain decoding, and 1.37 without tries. An
# adversarial one costs up to 1.6 % more (docs/policy.md).
RETRY_ROUNDS = 16
_LONGEST_PAUSE = 1 / (1 - DISCOUNT)  # rounds, the memory of all that is learnt


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

    def begin(self, num_requests: int, reading_rounds: float) -> None:
        """Begin a try of `REVIEW_ROUNDS` if one is due.

        Args:
            num_requests: those at once; with many, few rounds have shown enough, and bad luck is rare.
            reading_rounds: time in which the drafter reads the texts while the target waits, in rounds.
        """
        pause = min(self._pause * num_requests, _LONGEST_PAUSE) * (1 + reading_rounds)
        if not self.is_on and self._idle_rounds >= pause:
            self._rounds_left = REVIEW_ROUNDS
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

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
