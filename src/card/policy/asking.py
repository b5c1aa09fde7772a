"""Choice of the requests that local writers are asked for: seldom one of whose candidates the target takes none.

To ask takes Python for each request and round. A text that repeats nothing makes that a loss, and where it begins to
repeat something, that is found out a few rounds later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from card.workers.offers import DRAFTER_BIT
from card.workers.request import Verified

_LONGEST_PAUSE = 8  # rounds between two questions, of as many requests at once or more; of fewer, as many as these
_FEW = 4  # candidates that a writer is asked for whose last ones were of no use


@dataclass(slots=True)
class _Asked:
    """Answers for one request."""

    asked_at: int  # round
    pause: int = 0  # rounds until the next question


class Asking:
    """Says how many candidates each local writer is asked for in a round."""

    def __init__(self) -> None:
        self._round = 0
        self._asked: dict[int, _Asked] = {}
        self.was_asked = False  # anybody, in this round

    def begin(self) -> None:
        """Go on to the next round."""
        self._round += 1
        self.was_asked = False

    def budget(self, request_id: int, most: int) -> int:
        """Return how many candidates each writer is asked for in this round: 0, a few, or ``most``."""
        asked = self._asked.get(request_id)
        if asked is not None and self._round - asked.asked_at <= asked.pause:
            return 0
        self.was_asked = True
        return min(_FEW, most) if asked is not None and asked.pause else most

    def observe(self, verified: Sequence[Verified]) -> None:
        """Learn from the verifications of a round which requests are worth asking for."""
        asked: dict[int, _Asked] = {}
        for one in verified:
            request_id = one.request_id
            known = self._asked.get(request_id) or _Asked(self._round)
            if self._round - known.asked_at > known.pause or request_id not in self._asked:
                writers = one.offer.writers
                is_of_use = any(writers[idx] & ~DRAFTER_BIT for idx in one.accepted) if writers else False
                pause = min(2 * known.pause or 1, _LONGEST_PAUSE, len(verified))
                known = _Asked(self._round, 0 if is_of_use else pause)
            asked[request_id] = known
        self._asked = asked
