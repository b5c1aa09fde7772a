"""Offsets of tokens in a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from card.text.tokenizer import Tokenizer
from card.text.tokens import Detokenizer


class TokenOffsets:
    """Finds for each token the number of characters before it in the text.

    Tokens that share a character begin where it begins. A token without text begins where the next one does. An offset
    may have to wait for later tokens, which decide what the token's bytes become.
    """

    def __init__(self, tokenizer: Tokenizer, *, after: Sequence[int] = (), start: int = 0) -> None:
        """Begin.

        Args:
            after: tokens of the prompt, see `Detokenizer`.
            start: characters of the text before the first token.
        """
        self._detokenizer = Detokenizer(tokenizer, after=after)
        self._num_chars = start  # characters that no later token can change
        self._waiting: list[str] = []  # for each token without an offset yet, the uncertain text before it

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """Add tokens and return the offsets that are certain now, of the oldest tokens without one."""
        offsets: list[int] = []
        for token_id in token_ids:
            before = self._detokenizer.held_back
            if before or self._waiting:
                self._waiting.append(before)
            else:
                offsets.append(self._num_chars)
            if piece := self._detokenizer.push([token_id]):
                offsets += self._settled(piece)
        return offsets

    def flush(self) -> list[int]:
        """Return the offsets that are missing, after the last token."""
        return self._settled(self._detokenizer.flush())

    def _settled(self, text: str) -> list[int]:
        """Return the offsets of the tokens that waited for this text.

        The text before a token is decoded as if it ended there. The token begins where the whole text differs from it.
        """
        offsets: list[int] = []
        least = 0
        for before in self._waiting:
            least = max(least, _num_common(before, text))
            offsets.append(self._num_chars + least)
        self._waiting = []
        self._num_chars += len(text)
        return offsets


def _num_common(one: str, other: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    differing = (idx for idx, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


def offsets_in(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return where the tokens of an encoded text begin in it, even if they spell it differently."""
    places = TokenOffsets(tokenizer)
    return [min(offset, len(text)) for offset in (*places.push(token_ids), *places.flush())]
