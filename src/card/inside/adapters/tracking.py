"""Follow requests without ids: an engine hands over rows of tokens, and rows move, leave and return.

A row belongs to the request whose text it continues. Requests with equal texts need not be distinguished, as the same
is true of both. Confusing requests with equal ends costs only speed, as candidates never decide the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class FollowedText:
    """A text as far as the engine has shown it."""

    token_ids: list[int]
    """All tokens; grows in place."""

    def __init__(self, token_ids: Tokens) -> None:
        """Begin with these tokens, [S], 1 or more."""
        self.token_ids = token_ids.tolist()
        self._held = np.empty(2 * len(token_ids), np.int32)
        self._held[: len(token_ids)] = token_ids

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, new_ids: Sequence[int]) -> None:
        """Append these tokens."""
        old_len, new_len = len(self.token_ids), len(self.token_ids) + len(new_ids)
        if new_len > len(self._held):
            self._held = np.concatenate([self._held, np.empty(new_len, np.int32)])
        self._held[old_len:new_len] = new_ids
        self.token_ids += new_ids

    def is_at(self, row: Tokens, length: int) -> bool:
        """Return whether a row's first ``length`` tokens are this text."""
        return length == len(self.token_ids) and bool((self._held[:length] == row[:length]).all())


TextT = TypeVar("TextT", bound=FollowedText)


@dataclass(slots=True)
class Followed(Generic[TextT]):
    """The texts of one step."""

    texts: list[TextT | None]  # of each row; None: the row is not followed
    begun: list[TextT] = field(default_factory=list)  # new
    resumed: list[TextT] = field(default_factory=list)  # parked before
    left: list[TextT] = field(default_factory=list)  # finished or preempted, which the engine does not say
    forgotten: list[TextT] = field(default_factory=list)  # parked for too long


class RowTracker(Generic[TextT]):
    """Finds the text of each row. A text without a row is parked, in case it was preempted."""

    def __init__(self, begin: Callable[[Tokens], TextT], *, max_parked: int) -> None:
        """Make a tracker without texts.

        Args:
            begin: makes a text of a row's tokens, [S].
            max_parked: most texts without a row; the longest parked ones are forgotten.
        """
        self._begin = begin
        self._max_parked = max_parked
        self._rows: list[TextT | None] = []  # of the last step
        self._parked: dict[int, TextT] = {}  # by identity, the longest parked first

    def follow(self, lengths: Sequence[int], tokens: Tokens) -> Followed[TextT]:
        """Return the text of each row.

        Args:
            lengths: [B] tokens of each row before this step; an empty row is not followed.
            tokens: [B or more, S] tokens of each row.
        """
        left = {id(text): text for text in self._rows if text is not None}
        step: Followed[TextT] = Followed([None] * len(lengths))
        missing: list[int] = []
        for row_idx, length in enumerate(lengths):
            last = self._rows[row_idx] if row_idx < len(self._rows) else None
            if last is not None and last.is_at(tokens[row_idx], length):
                step.texts[row_idx] = left.pop(id(last))
            elif 0 < length <= tokens.shape[1]:
                missing.append(row_idx)
        if missing:
            self._find(missing, lengths, tokens, left, step)
        self._parked |= left
        step.left += left.values()
        while len(self._parked) > self._max_parked:
            step.forgotten.append(self._parked.pop(next(iter(self._parked))))
        self._rows = list(step.texts)
        return step

    def forget_all(self) -> list[TextT]:
        """Return every text, and stop following them."""
        texts = [*(text for text in self._rows if text is not None), *self._parked.values()]
        self._rows, self._parked = [], {}
        return texts

    def _find(
        self,
        missing: Sequence[int],
        lengths: Sequence[int],
        tokens: Tokens,
        left: dict[int, TextT],
        step: Followed[TextT],
    ) -> None:
        """Assign moved or parked texts to the rows in ``missing``, and new texts to the rest."""
        candidates: dict[tuple[int, int], list[TextT]] = {}
        for text in (*left.values(), *self._parked.values()):
            candidates.setdefault((len(text), text.token_ids[-1]), []).append(text)
        for row_idx in missing:
            length, row = lengths[row_idx], tokens[row_idx]
            alike = candidates.get((length, int(row[length - 1])), [])
            known = next((text for text in alike if text.is_at(row, length)), None)
            if known is None:
                known = self._begin(row[:length])
                step.begun.append(known)
            else:
                alike.remove(known)
                if left.pop(id(known), None) is None:
                    del self._parked[id(known)]
                    step.resumed.append(known)
            step.texts[row_idx] = known
