"""The text of one request, piece by piece as its tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

from card.text.stops import StopMarks, StopStrings
from card.text.tokenizer import Tokenizer
from card.text.tokens import Detokenizer


class TextStream:
    """The text of one request as it grows; tells the target when a stop string is complete.

    Shown text waits until no later token can change it. Stop strings do not wait: they are searched in everything that
    is complete so far, including characters of byte tokens that a later byte might spoil, and special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        min_tokens: int = 0,
        *,
        after: Sequence[int] = (),
    ) -> None:
        """Begin. Stop strings that are complete within the first ``min_tokens`` tokens do not count.

        Args:
            after: tokens of the prompt, see `Detokenizer`.
        """
        self._detokenizer = Detokenizer(tokenizer, after=after)
        self._marks = StopMarks(stop, self._detokenizer.silent_tokens)
        self._placed: list[tuple[int, str]] = []  # marks within the waiting text, each with the characters before
        self._num_exempt = min_tokens
        self._num_passed = 0  # characters of the waiting text whose tokens were exempt
        self._stops = StopStrings(self._marks.stops)
        self._longest = max(map(len, stop), default=0)
        self._is_fed = bool(stop)  # the target feeds it token by token
        self._piece = ""

    @property
    def end_ids(self) -> frozenset[int]:
        """The special tokens that are stop strings by themselves."""
        return self._marks.end_ids

    def stop_met(self, last_ids: Sequence[int]) -> str:
        """Return the stop string that ended the text with these tokens; empty if none did."""
        return self._marks.met(self._stops.found, last_ids)

    def feed(self, token_id: int) -> bool:
        """Take the next token; return True if a stop string is complete now."""
        may_end = self._num_exempt <= 0
        self._num_exempt -= 1
        mark = self._marks.of_token.get(token_id)
        if mark is not None:
            self._placed.append((len(self._detokenizer.waiting()), mark))
        piece = self._detokenizer.push([token_id])
        if piece or (mark is not None and not self._placed[-1][0]):
            self._search(piece, may_end=may_end)
        elif may_end and (mark is not None or self._detokenizer.has_new_character) and self._completes_stop():
            self._search(self._detokenizer.flush(), may_end=True)
        if self._num_exempt == 0:
            self._num_passed = len(self._waiting())
        return self._stops.found is not None

    def take(self, token_ids: Sequence[int], *, is_end: bool) -> str:
        """Return the text that these committed tokens made certain; at the end, all remaining text."""
        if not self._is_fed:
            self._piece += self._detokenizer.push(token_ids)
        if is_end:
            self._search(self._detokenizer.flush(), may_end=self._num_exempt <= 0)
            self._piece += self._stops.flush()
        piece, self._piece = self._marks.removed(self._piece), ""
        return piece

    def _search(self, piece: str, *, may_end: bool) -> None:
        """Search certain text, with its marks, for stop strings."""
        piece = self._marked(piece)
        num_passed = self._num_passed if may_end else len(piece)
        self._piece += self._stops.push(piece[:num_passed], may_end=False) + self._stops.push(piece[num_passed:])
        self._placed, self._num_passed = [], 0

    def _completes_stop(self) -> bool:
        return self._stops.completes(self._waiting(self._longest))

    def _waiting(self, num_chars: int | None = None) -> str:
        """Return the waiting text with its marks, or the end of it."""
        return self._marked(self._detokenizer.waiting(None if self._placed else num_chars))

    def _marked(self, text: str) -> str:
        for num_before, mark in reversed(self._placed):
            text = text[:num_before] + mark + text[num_before:]
        return text
