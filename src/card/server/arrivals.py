"""All requests with a body, from their arrival until their answers are sent, and the memory that waits for clients.

A body that is coming, log-probabilities of a prompt, and text that a client does not read take memory for as long as
the client likes. All of it has one budget.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from card.server.errors import ApiError, shutting_down
from card.server.limits import Deadline


@dataclass(slots=True, eq=False)
class Arrival:
    """A request that has arrived: whose it is, when it ends at the latest, and the bytes that are held for it."""

    client: str
    deadline: Deadline
    num_bytes: int = 0
    is_ended: bool = False  # for its memory


class Arrivals:
    """The requests that have arrived and are not answered yet; what arrives while the server shuts down is refused."""

    def __init__(self, first_token_s: float, answer_s: float, most_bytes: int) -> None:
        """Limit the seconds of each request as `Deadline` does, and the bytes that all of them hold together."""
        self.is_open = True  # until the server shuts down
        self._limits_s = first_token_s, answer_s
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._inside: dict[Arrival, None] = {}  # the oldest first
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._inside)

    def begin(self, client: str) -> Arrival:
        """Count a request as arrived. Raises: ApiError 503 while shutting down."""
        if not self.is_open:
            raise shutting_down()
        arrival = Arrival(client, Deadline(*self._limits_s))
        self._inside[arrival] = None
        self._is_empty.clear()
        return arrival

    def end(self, arrival: Arrival) -> None:
        """Forget a request: it is answered."""
        del self._inside[arrival]
        self._num_bytes -= arrival.num_bytes
        if not self._inside:
            self._is_empty.set()

    def hold(self, arrival: Arrival, num_bytes: int) -> None:
        """Count bytes that are held for a request, or fewer of them; it may end the oldest offender."""
        if arrival.is_ended or arrival not in self._inside:
            return
        arrival.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes:
            self._end_offender()

    def _end_offender(self) -> None:
        """End the oldest of the requests that hold as much as the mean of those that hold something."""
        holders = [one for one in self._inside if one.num_bytes > 0]
        offender = next(one for one in holders if one.num_bytes * len(holders) >= self._num_bytes)
        offender.deadline.cut(
            ApiError(
                503,
                f"the server holds {self._most_bytes} bytes for all clients that wait, send or read slowly, and this "
                "request is the oldest that holds many; send and read faster, or ask for less at once",
                code="no_memory",
                retry_after_s=5,
            )
        )
        self._num_bytes -= offender.num_bytes
        offender.num_bytes, offender.is_ended = 0, True

    async def until_empty(self) -> None:
        """Wait until the last one is answered."""
        await self._is_empty.wait()

    def cut_off(self) -> None:
        """End all: the time for shutting down is over."""
        for arrival in list(self._inside):
            arrival.deadline.cut(shutting_down())
