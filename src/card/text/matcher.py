"""Following a grammar: which tokens may come after a text and after each candidate below it.

The work is done by llguidance's matchers, which go forward and back along paths of candidates, so that a whole tree
costs one step for each of its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from card.errors import GrammarError
from card.tree.masks import Path

_MOST_QUOTED_CHARS = 300  # of the library's message, which may quote the whole grammar
_NO_WAY_BACK = "rollback not supported"
_LISTING = re.compile(r"\n\s*\d+ \| ")  # the library shows the grammar, which may be none that the user wrote


class MatcherState:
    """A `GrammarState` that walks one matcher along the paths in the order of a walk over their tree.

    The matcher never gets an end token: at the end of the grammar that would be one step too many.
    """

    def __init__(
        self, start: Any, num_ids: int, end_ids: frozenset[int], beginning: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Take a matcher at the beginning of its grammar, which is copied and stays as it is.

        Args:
            num_ids: tokens that it knows of.
            end_ids: tokens that end a text.
            beginning: a bit for each token that may come first, if that is known.
        """
        self._start = start
        self._num_ids = num_ids
        self._num_bytes = -(-num_ids // 8)
        self._end_ids = end_ids
        self._matcher: Any = start.deep_copy()  # None: it gave up, and the next path gets another one
        self._text: list[int] = []
        self._path: list[int] = []  # tokens beyond the text that the matcher has taken
        self._base: Any = None  # behind the text; for grammars whose matchers cannot go back
        self._beginning = beginning
        self._lost: str | None = None  # why the grammar cannot be followed any further

    def fork(self) -> MatcherState:
        """Return a state at the beginning of the same grammar."""
        return MatcherState(self._start, self._num_ids, self._end_ids, self._beginning)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take committed tokens, see `GrammarState`."""
        end = next((idx for idx, token_id in enumerate(token_ids) if token_id in self._end_ids), len(token_ids))
        try:
            if not self._go(token_ids[:end]):
                self._lost = self._lost or "the text does not keep to its grammar; leave grammar out, or report this"
        except GrammarError as error:
            self._lost = self._lost or str(error)
        self._text += self._path
        self._path = []
        if self._base is not None and self._matcher is not None:
            self._base = self._matcher.deep_copy()

    def can_be_begun(self) -> bool:
        """Return whether a token may come first; the library itself names some even if the model has none of them."""
        (row,) = self.allowed([()])
        return any(
            token_id in self._end_ids or self._matcher.validate_tokens([token_id])
            for token_id in row.nonzero()[0].tolist()
        )

    def allowed(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow the text and each path, see `GrammarState`.

        A row can be narrower than what the matcher would take: text that is forced has its usual tokens and no others.
        """
        if self._lost is not None:
            raise GrammarError(self._lost)
        rows = np.full((len(paths), self._num_bytes), 0xFF, np.uint8)
        for idx in walk_order(paths):
            if not self._text and not paths[idx]:
                rows[idx] = self._first_bits()
            elif self._go(paths[idx]):
                rows[idx] = self._bits()
        return np.unpackbits(rows, axis=1, count=self._num_ids, bitorder="little").view(np.bool_)

    def forced(self, path: Path) -> list[int]:
        """Return the tokens that must follow the text and a path, see `GrammarState`."""
        if self._lost is not None or not self._go(path):
            return []
        forced: list[int] = self._checked(self._matcher.compute_ff_tokens())
        ends = (idx for idx, token_id in enumerate(forced) if token_id in self._end_ids or token_id >= self._num_ids)
        return forced[: next(ends, len(forced))]

    def _first_bits(self) -> npt.NDArray[np.uint8]:
        """Return a bit for each token that may come first: it is found out once for all texts of the grammar."""
        if self._beginning is None:
            self._go(())
            self._beginning = self._bits()
        return self._beginning

    def _bits(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._checked(self._matcher.compute_bitmask()), np.uint8)[: self._num_bytes]

    def _go(self, path: Path) -> bool:
        """Bring the matcher behind the text and a path, or as far along it as the grammar permits; say which.

        No path goes beyond an end token.

        Raises: GrammarError if the library gives up.
        """
        if self._matcher is None:
            self._begin_anew()
        num_common = 0
        while num_common < min(len(path), len(self._path)) and path[num_common] == self._path[num_common]:
            num_common += 1
        if num_common < len(self._path):
            num_common = self._go_back(num_common)
        rest = list(path[num_common:])
        if any(token_id in self._end_ids or token_id >= self._num_ids for token_id in rest):
            return False
        num_taken = self._checked(self._matcher.try_consume_tokens(rest)) if rest else 0
        self._path += rest[:num_taken]
        return bool(num_taken == len(rest))

    def _go_back(self, num_common: int) -> int:
        """Take the matcher back to so many tokens of its path, or behind the text. Returns: the tokens that it has.

        A grammar with a bound on tokens, such as a budget of thoughts, lets no matcher go back: a copy does.
        """
        if self._base is None:
            self._matcher.rollback(len(self._path) - num_common)
            if not self._matcher.is_error():
                del self._path[num_common:]
                return num_common
            if _NO_WAY_BACK not in self._matcher.get_error():
                self._checked(None)
            self._begin_anew()
            self._base = self._matcher.deep_copy()
        self._matcher, self._path = self._base.deep_copy(), []
        return 0

    def _begin_anew(self) -> None:
        """Bring another matcher behind the text, token by token: within a call the library lets no other thread run."""
        self._matcher = self._start.deep_copy()
        for token_id in self._text:
            self._checked(self._matcher.try_consume_tokens([token_id]))

    def _checked(self, result: Any) -> Any:
        """Return a result of the matcher. Raises: GrammarError if it gave up, which it never recovers from."""
        if not self._matcher.is_error():
            return result
        reason = first_line(self._matcher.get_error())
        self._matcher, self._path = None, []
        raise GrammarError(f"the grammar cannot be followed: {reason}; use a simpler one")


def walk_order(paths: Sequence[Path]) -> list[int]:
    """Return the indices of paths, sorted so that paths with a common beginning are neighbours."""
    return sorted(range(len(paths)), key=lambda idx: tuple(paths[idx]))


def first_line(text: str) -> str:
    """Return the library's message without the state and the places in its own code that follow."""
    said = " ".join(_LISTING.split(text.partition("<state>")[0].partition("<backtrace>")[0])[0].split())
    if said.startswith("panic:"):
        return "it is more than the library can follow"
    return said if len(said) <= _MOST_QUOTED_CHARS else said[:_MOST_QUOTED_CHARS] + "..."
