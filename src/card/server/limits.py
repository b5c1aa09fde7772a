"""Limits of the server: requests that run and wait, time of a request."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Self

from card.server.errors import ApiError, bad_request

_MOST_RETRY_AFTER_S = 60


class Gate:
    """Admits as many texts as may run and wait; a full queue still takes clients that have less than their share.

    Together these get as many places again at most, however many addresses somebody has.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._most = max_running + max_waiting
        self._inside: dict[object, tuple[int, float, str]] = {}  # ticket -> texts, time of entry, client
        self._mean_s = 1.0  # of a request

    @property
    def num_requests(self) -> int:
        """Requests that are being answered."""
        return len(self._inside)

    def enter(self, num_sequences: int, client: str) -> object:
        """Admit a request of a client; return its ticket.

        A client's share is what all may have over the number of clients, so that none fills the queue for the others.

        Raises: ApiError 429 if there is no room now, 400 if there never is.
        """
        num_inside = sum(count for count, _, _ in self._inside.values())
        num_own = sum(count for count, _, whose in self._inside.values() if whose == client)
        share = self._most // len({client, *(whose for _, _, whose in self._inside.values())})
        if num_sequences > self._most:
            raise bad_request(f"a request may ask for at most {self._most} texts, got {num_sequences}", "n")
        num_then = num_inside + num_sequences
        if num_then > self._most and (num_own + num_sequences > share or num_then > 2 * self._most):
            raise ApiError(
                429,
                f"the queue is full: {num_inside} texts are being written or wait, at most {self._most} may",
                code="queue_full",
                retry_after_s=self._retry_after_s(num_inside),
            )
        ticket = object()
        self._inside[ticket] = num_sequences, asyncio.get_running_loop().time(), client
        return ticket

    def leave(self, ticket: object) -> None:
        """Return a ticket and free its place."""
        _, entered_at, _ = self._inside.pop(ticket)
        self._mean_s += 0.1 * (asyncio.get_running_loop().time() - entered_at - self._mean_s)

    def _retry_after_s(self, num_inside: int) -> int:
        """Return when a place should be free, at the pace of the last requests."""
        num_waiting = max(1, num_inside - self._max_running)
        return min(_MOST_RETRY_AFTER_S, max(1, math.ceil(self._mean_s * num_waiting / self._max_running)))


class Deadline:
    """Ends the block under it with an ApiError: when its time is over, or at once by `cut`.

    A long prompt takes long to read, and the client waits for it; so the answer's time begins with its first token.
    """

    def __init__(self, first_token_s: float, answer_s: float) -> None:
        """Allow so many seconds until the first token, and from there on."""
        self._answer_s = answer_s
        self._has_begun = False  # the answer, or the end
        self._timeout: asyncio.Timeout | None = None
        self._set(first_token_s, _too_long(f"had no token within the {first_token_s:g} s"))

    def begin_answer(self) -> None:
        """Count from now on: the first token is there. Later calls change nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._set(self._answer_s, _too_long(f"took longer than the {self._answer_s:g} s"))

    def cut(self, reason: ApiError) -> None:
        """End it now."""
        self._has_begun = True
        self._set(0.0, reason)

    def _set(self, seconds: float, reason: ApiError) -> None:
        self._reason, self._at = reason, asyncio.get_running_loop().time() + seconds
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._at)

    async def __aenter__(self) -> Self:
        self._timeout = asyncio.timeout_at(self._at)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        assert self._timeout is not None
        timeout, self._timeout = self._timeout, None
        try:
            await timeout.__aexit__(*failure)
        except TimeoutError:
            raise self._reason from None


def _too_long(what: str) -> ApiError:
    return ApiError(
        503,
        f"the request {what} that this server allows; ask for less",
        code="request_timeout",
        retry_after_s=1,
        is_worth_retrying=False,
    )
