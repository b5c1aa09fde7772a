"""Text that the drafter has yet to read before it can draft for a request, and whether reading it pays.

Reading takes the drafter a pass over the text. What drafts bring grows with every token that the answer still gets. So
a request joins the drafting when what its answer may still save exceeds what reading costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from card.engine.metrics import RequestStats
from card.engine.policy.acceptance import DEEPEST
from card.engine.request import Request, Update

FIRST_LENGTH = 256.0  # expected tokens of an answer before any has finished
_NEW_SHARE = 1 / 16  # weight of a finished answer in the mean length
_FEW = 2 * DEEPEST  # tokens that the drafter reads in passing: about what two rounds may commit


class Unread:
    """Tokens of each request that the drafter has not read, and the tokens that its answer may still get."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """Begin without requests.

        Args:
            seconds: in which the drafter reads so many tokens.
        """
        self._seconds = seconds
        self._answers: dict[int, RequestStats] = {}  # live counters of the running requests
        self._read: dict[int, int] = {}  # tokens of each text when the drafter last read it
        self._mean_length = FIRST_LENGTH
        self._decoding: Sequence[Request] = ()

    def observe(self, decoding: Sequence[Request], updates: Iterable[Update]) -> None:
        """Take what a round told of the running requests."""
        self._decoding = decoding
        for one in updates:
            if one.finish_reason is None:
                self._answers[one.request_id] = one.stats
            else:
                self._answers.pop(one.request_id, None)
                self._read.pop(one.request_id, None)
                self._mean_length += _NEW_SHARE * (one.stats.num_new_tokens - self._mean_length)

    def note_read(self, requests: Iterable[Request]) -> None:
        """Record that the drafter reads the whole texts of these requests now."""
        for request in requests:
            self._read[request.request_id] = self._length(request)

    def least_s(self) -> float:
        """Return the seconds of reading for the request of the last round with the least to read."""
        return min(map(self.reading_s, self._decoding), default=0.0)

    def reading_s(self, request: Request) -> float:
        """Return the seconds in which the drafter reads what it has not read of a text; 0 for a few tokens."""
        num_tokens = self._length(request) - self._read.get(request.request_id, 0)
        return self._seconds(num_tokens) if num_tokens > _FEW else 0.0

    def worth(self, requests: Iterable[Request], saved_s: float) -> list[Request]:
        """Return the requests whose answers may save more than reading costs, at ``saved_s`` for each token."""
        return [one for one in requests if saved_s * self._expected_left(one) >= self.reading_s(one)]

    def readable(self, requests: Iterable[Request], most_s: float) -> list[Request]:
        """Return the requests with the least to read: as many as fit into these seconds, and one at least."""
        ranked = sorted(requests, key=self.reading_s)
        spent_s = accumulate(map(self.reading_s, ranked))
        return [
            one
            for idx, (one, so_far_s) in enumerate(zip(ranked, spent_s, strict=True))
            if not idx or so_far_s <= most_s
        ]

    def _expected_left(self, request: Request) -> float:
        """Return how many tokens an answer is expected to get yet: as many again once it is longer than the mean."""
        num_new = self._num_new(request)
        return min(request.params.max_tokens - num_new, max(self._mean_length - num_new, num_new))

    def _length(self, request: Request) -> int:
        return len(request.prompt_ids) + self._num_new(request)

    def _num_new(self, request: Request) -> int:
        answer = self._answers.get(request.request_id)
        return answer.num_new_tokens if answer else 0
