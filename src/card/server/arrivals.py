"""All requests with a body, from their arrival until their answers are sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from card.server.errors import shutting_down
from card.server.limits import Deadline


@dataclass(slots=True, eq=False)
class Arrival:
    """A request that has arrived: whose it is, and when it ends at the latest."""

    client: str
    deadline: Deadline


class Arrivals:
    """The requests that have arrived and are not answered yet; what arrives while the server shuts down is refused."""

    def __init__(self, limit_s: float) -> None:
        """Begin with none; each may take ``limit_s``."""
        self.is_open = True  # until the server shuts down
        self._limit_s = limit_s
        self._inside: dict[Arrival, None] = {}  # the oldest first
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._inside)

    def begin(self, client: str) -> Arrival:
        """Count a request as arrived. Raises: ApiError 503 while shutting down."""
        if not self.is_open:
            raise shutting_down()
        arrival = Arrival(client, Deadline(self._limit_s))
        self._inside[arrival] = None
        self._is_empty.clear()
        return arrival

    def end(self, arrival: Arrival) -> None:
        """Forget a request: it is answered."""
        del self._inside[arrival]
        if not self._inside:
            self._is_empty.set()

    async def until_empty(self) -> None:
        """Wait until the last one is answered."""
        await self._is_empty.wait()

    def cut_off(self) -> None:
        """End all: the time for shutting down is over."""
        for arrival in list(self._inside):
            arrival.deadline.cut(shutting_down())
