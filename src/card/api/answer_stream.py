"""The parts of one answer, piece by piece as its tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

from card.api.outputs import AnswerText
from card.text.parts.pieces import Content, Piece
from card.text.parts.view import AnswerView
from card.text.stops import StopMarks, StopStrings
from card.text.tokenizer import Tokenizer
from card.text.tokens import Detokenizer


class AnswerStream:
    """Reads one answer as it grows; tells the target when a stop string is complete in its content.

    Stop strings mean the content alone: neither thoughts nor calls end at one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        view: AnswerView,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        *,
        after: Sequence[int] = (),
    ) -> None:
        """Begin; arguments as of `TextStream`, and how the text is read."""
        self._detokenizer = Detokenizer(tokenizer, after=after)
        self._marks, self._reader = view.token_marks, view.reader()
        self._silent_stops = StopMarks(stop, tokenizer.skipped_tokens)
        self.end_ids = self._silent_stops.end_ids - self._marks.keys()  # a mark that ends a part ends no answer
        self._stops, self._is_fed = StopStrings(stop), bool(stop)
        self._num_exempt = min_tokens
        self._pieces: list[Piece] = []
        self._thinks: list[bool] = []  # of the tokens that are not taken

    def stop_met(self, last_ids: Sequence[int]) -> str:
        """Return the stop string that ended the text with these tokens; empty if none did."""
        return self._silent_stops.met(self._stops.found, last_ids)

    def feed(self, token_id: int) -> bool:
        """Take the next token; return True if a stop string is complete now."""
        may_end = self._num_exempt <= 0
        self._num_exempt -= 1
        was_outside = self._reader.is_outside
        mark = self._marks.get(token_id)
        text = self._detokenizer.push([token_id]) if mark is None else self._detokenizer.flush() + mark
        self._add(self._reader.push(text), may_end=may_end)
        self._thinks.append(was_outside or self._reader.is_thinking)
        return self._stops.found is not None

    def take(self, token_ids: Sequence[int], *, is_end: bool) -> AnswerText:
        """Return what these committed tokens made certain; at the end, all that remains."""
        if not self._is_fed:
            for token_id in token_ids:
                self.feed(token_id)
        if is_end:
            self._add(self._reader.push(self._detokenizer.flush()), may_end=self._num_exempt <= 0)
            self._add(self._reader.flush(), may_end=self._num_exempt <= 0)
            self._show(self._stops.flush())
        pieces, self._pieces = tuple(self._pieces), []
        thinks, self._thinks = tuple(self._thinks[: len(token_ids)]), self._thinks[len(token_ids) :]
        return AnswerText("".join(one.text for one in pieces if isinstance(one, Content)), pieces, thinks)

    def _add(self, pieces: Sequence[Piece], *, may_end: bool) -> None:
        for piece in pieces:
            if self._stops.found is not None:
                return
            if isinstance(piece, Content):
                self._show(self._stops.push(piece.text, may_end=may_end))
            else:
                self._show(self._stops.flush())
                self._pieces.append(piece)

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))
