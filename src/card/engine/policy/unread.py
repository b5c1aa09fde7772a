"""Text that the drafter has yet to read before it can draft for a request, and whether reading it pays.

Reading takes the drafter a pass over the text. What drafts bring grows with every round that the answer still takes. So
a request joins the drafting when what its answer may still save exceeds what reading costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from card.drafting.drafter import MAX_TOKENS_PER_PASS as _MOST_PIECE
from card.drafting.window import num_skipped
from card.engine.metrics import RequestStats
from card.engine.policy.acceptance import DEEPEST
from card.engine.request import Request, Update

_FIRST_ROUNDS = 256  # of made-up answers, before any have finished
_NUM_ANSWERS = 16  # finished ones whose rounds are known
_FEW = 1 + DEEPEST  # tokens that the drafter reads in passing: as many as a round may commit
_MANY = 64  # requests that may be remembered after they were aborted
_LEAST_PIECE = 16  # tokens of a text that are read at once, however slow the drafter is


@dataclass(frozen=True, slots=True)
class Reading:
    """Requests that draft in a round, and the tokens of their texts that the drafter reads before."""

    requests: Sequence[Request]
    num_tokens: int = 0  # without the few that each round adds
    leaves_rest: bool = False  # of the last one


class Unread:
    """Tokens of each request that the drafter has not read, and the rounds that its answer may still take."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """Begin without requests.

        Args:
            seconds: in which the drafter reads so many tokens.
        """
        self._seconds = seconds
        self._answers: dict[int, RequestStats] = {}  # live counters of the running requests
        self._read: dict[int, int] = {}  # tokens of each text when the drafter last read it
        self._rounds = deque([_FIRST_ROUNDS] * _NUM_ANSWERS, _NUM_ANSWERS)  # of finished answers
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
                self._rounds.append(one.stats.target_passes)
        if len(self._answers) > _MANY + 2 * len(decoding):  # aborted requests have no last update
            running = {one.request_id for one in decoding}
            self._answers = {key: one for key, one in self._answers.items() if key in running}
            self._read = {key: one for key, one in self._read.items() if key in running}

    def begin(self, requests: Sequence[Request], most_s: float) -> Reading:
        """Let the drafter read these texts as far as that takes no longer than this, those with the least first.

        Of a text that takes longer alone a piece is read.
        """
        drafting, most, num_tokens = list[Request](), self._piece(most_s), 0
        for request in sorted(requests, key=self.num_tokens):
            lacking, length = self.num_tokens(request), self._length(request)
            if lacking > _FEW:
                if num_tokens and num_tokens + lacking > most:
                    break
                num_tokens += min(lacking, most)
            drafting.append(request)
            if lacking > most:
                self._read[request.request_id] = length - lacking + most
                return Reading(drafting, num_tokens, leaves_rest=True)
            self._read[request.request_id] = length
        return Reading(drafting, num_tokens)

    def _piece(self, most_s: float) -> int:
        """Return how many tokens the drafter reads in these seconds, rounded down to a power of two."""
        num_tokens = _LEAST_PIECE
        while self._seconds(2 * num_tokens) <= most_s and num_tokens < _MOST_PIECE:
            num_tokens *= 2
        return num_tokens

    def num_tokens(self, request: Request) -> int:
        """Return how many tokens of a text the drafter would have to read: of a long one, its end."""
        length = self._length(request)
        return min(length - self._read.get(request.request_id, 0), length - num_skipped(length))

    def least_s(self) -> float:
        """Return the seconds of reading for the request of the last round with the least to read."""
        return min(map(self.reading_s, self._decoding), default=0.0)

    def reading_s(self, request: Request) -> float:
        """Return the seconds in which the drafter reads what it has not read of a text; 0 for a few tokens."""
        num_tokens = self.num_tokens(request)
        return self._seconds(num_tokens) if num_tokens > _FEW else 0.0

    def worth(self, requests: Iterable[Request], saved_s: float) -> list[Request]:
        """Return the requests whose answers may save more than reading costs, at ``saved_s`` for each round."""
        return [one for one in requests if saved_s * self._expected_left(one) >= self.reading_s(one)]

    def _expected_left(self, request: Request) -> float:
        """Return how many rounds an answer is expected to take yet: what others copy, drafts cannot save.

        By finished answers that took more than half of its rounds, and by one that is made up, of twice as many.
        """
        answer = self._answers.get(request.request_id)
        num_done = answer.target_passes if answer else 0
        left = [max(0, rounds - num_done) for rounds in self._rounds if 2 * rounds > num_done]
        return min(request.params.max_tokens - self._num_new(request), sum(left, num_done) / (1 + len(left)))

    def _length(self, request: Request) -> int:
        return len(request.prompt_ids) + self._num_new(request)

    def _num_new(self, request: Request) -> int:
        answer = self._answers.get(request.request_id)
        return answer.num_new_tokens if answer else 0
