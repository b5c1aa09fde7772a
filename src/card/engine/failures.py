"""Errors in one request's part of a round, which end only that request."""

from __future__ import annotations

import logging
from types import TracebackType

from card.errors import CardError, GrammarError, TargetError, in_words

logger = logging.getLogger(__name__)


class Failures:
    """The requests that failed in a round, each with its first error.

    with failures.of(request_id):
        ...  # an error in here is noted, and the round goes on after the block
    """

    def __init__(self) -> None:
        self.errors: dict[int, TargetError] = {}

    def __len__(self) -> int:
        return len(self.errors)

    def of(self, request_id: int) -> _Part:
        """Return a block; an error inside counts for this request."""
        return _Part(self, request_id)

    def add(self, request_id: int, error: Exception) -> None:
        """Note an error; an unexpected one is logged with its traceback."""
        if request_id in self.errors:
            return
        what = in_words(error)
        if not isinstance(error, CardError):
            logger.error("a request failed: %s", what, exc_info=error)
            what = f"this request failed: {what}"
        self.errors[request_id] = GrammarError(what) if isinstance(error, GrammarError) else TargetError(what)

    def take_in(self, other: Failures) -> None:
        """Add the errors of another part of the same round."""
        self.errors = {**other.errors, **self.errors}


class _Part:
    """A block in which errors belong to one request; a class, since a generator would cost several times as much."""

    __slots__ = ("_failures", "_request_id")

    def __init__(self, failures: Failures, request_id: int) -> None:
        self._failures, self._request_id = failures, request_id

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failures.add(self._request_id, error)
        return True
