"""The text of one request, piece by piece as its tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from card.text.tokens import Detokenizer, StopStrings


class TextStream:
    """The text of one request as it grows; tells the target when a stop string is complete."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...],
        min_tokens: int = 0,
        shown_token_ids: tuple[int, ...] = (),
        *,
        after: Sequence[int] = (),
    ) -> None:
        """Begin. Stop strings that are complete within the first ``min_tokens`` tokens do not count.

        Args:
            shown_token_ids: special tokens that are part of the text.
            after: tokens of the prompt, see `Detokenizer`.
        """
        self._detokenizer = Detokenizer(tokenizer, shown_token_ids, after=after)
        self._num_exempt = min_tokens
        self._stops = StopStrings(stop)
        self._is_fed = bool(stop)  # by the target, token by token
        self._piece = ""

    def feed(self, token_id: int) -> bool:
        """Take the next token; return True if a stop string is complete now."""
        may_end = self._num_exempt <= 0
        self._num_exempt -= 1
        self._piece += self._stops.push(self._detokenizer.push([token_id]), may_end=may_end)
        return self._stops.found is not None

    def take(self, token_ids: Sequence[int], *, is_end: bool) -> str:
        """Return the text that these committed tokens made certain; all that is left at the end."""
        if not self._is_fed:
            self._piece += self._detokenizer.push(token_ids)
        if is_end:
            rest = self._stops.push(self._detokenizer.flush(), may_end=self._num_exempt <= 0)
            self._piece += rest + self._stops.flush()
        piece, self._piece = self._piece, ""
        return piece
