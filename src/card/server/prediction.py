"""Predicted outputs: a text that an answer may repeat, and how much of it the answer does repeat."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

from card.server.service import LONG_CHARS, Service
from card.text.tokens import CHARS_PER_TOKEN

_NUM_FOUND_AGAIN = 4  # equal tokens in a row after which an answer repeats the prediction again


async def predicted(service: Service, text: str) -> tuple[int, ...]:
    """Return the tokens of a prediction, as far as the context could hold them, made beside the event loop."""
    most = service.llm.max_model_len
    text = text[: CHARS_PER_TOKEN * most]

    def made() -> tuple[int, ...]:
        ids = service.tokenizer.encode(text, add_special_tokens=False)
        return tuple(takewhile(lambda one: one < service.vocab_size, ids[:most]))

    return await service.run_in_thread(len(text) >= LONG_CHARS, made)


class Repeated:
    """Counts the tokens of a prediction that an answer repeats, in their order, each once.

    Where the answer differs, it counts again from the next place at which `_NUM_FOUND_AGAIN` tokens are equal.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._place = 0  # in the prediction, behind the last repeated token
        self._latest: deque[int] = deque(maxlen=_NUM_FOUND_AGAIN)  # tokens of the answer since it differs
        self._differs = False
        self._places: dict[tuple[int, ...], list[int]] = {}  # where runs of tokens begin; filled once it differs
        self.num_repeated = 0

    @property
    def num_others(self) -> int:
        """Tokens of the prediction that the answer did not repeat."""
        return len(self._token_ids) - self.num_repeated

    def push(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens of the answer."""
        for token_id in token_ids:
            if not self._differs and self._place < len(self._token_ids) and self._token_ids[self._place] == token_id:
                self._place += 1
                self.num_repeated += 1
                continue
            self._differs = True
            self._latest.append(token_id)
            self._find_again()

    def _find_again(self) -> None:
        if len(self._latest) < _NUM_FOUND_AGAIN:
            return
        if not self._places:
            for start in range(len(self._token_ids) - _NUM_FOUND_AGAIN + 1):
                self._places.setdefault(self._token_ids[start : start + _NUM_FOUND_AGAIN], []).append(start)
        places = self._places.get(tuple(self._latest), [])
        if (idx := bisect_left(places, self._place)) < len(places):
            self._place = places[idx] + _NUM_FOUND_AGAIN
            self.num_repeated += _NUM_FOUND_AGAIN
            self._differs = False
            self._latest.clear()
