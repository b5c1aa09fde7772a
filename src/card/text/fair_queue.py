"""Work of several clients for a few threads, in turns, so that no client holds up another one."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueTurn(Generic[T]):
    """A piece of work that may begin now."""

    client: str
    item: T


class FairQueue(Generic[T]):
    """Clients take turns, and none has more than so many pieces of work done at once. Any thread may call it."""

    def __init__(self, most_at_once: int) -> None:
        """Begin empty; ``most_at_once`` is of one client."""
        self._most_at_once = most_at_once
        self._waiting: dict[str, deque[T]] = {}  # by client, least recently served first
        self._num_running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Pieces of work that are being done."""
        with self._changed:
            return self._num_running.total()

    @property
    def is_closed(self) -> bool:
        """True if there are no more turns."""
        return self._is_closed

    def put(self, client: str, item: T) -> None:
        """Add a piece of work."""
        with self._changed:
            self._waiting.setdefault(client, deque()).append(item)
            self._changed.notify_all()

    def take(self) -> QueueTurn[T] | None:
        """Wait for the next turn, which ends with `done`; None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                for client, items in self._waiting.items():
                    if self._num_running[client] < self._most_at_once:
                        return self._begin(client, items)
                self._changed.wait()
            return None

    def _begin(self, client: str, items: deque[T]) -> QueueTurn[T]:
        del self._waiting[client]
        item = items.popleft()
        if items:
            self._waiting[client] = items  # behind all others
        self._num_running[client] += 1
        return QueueTurn(client, item)

    def done(self, turn: QueueTurn[T]) -> None:
        """End a turn."""
        with self._changed:
            self._num_running[turn.client] -= 1
            if not self._num_running[turn.client]:
                del self._num_running[turn.client]
            self._changed.notify_all()

    def remove(self, client: str, item: T) -> bool:
        """Take back what waits; return whether it did."""
        with self._changed:
            items = self._waiting.get(client, deque())
            if item not in items:
                return False
            items.remove(item)
            if not items:
                del self._waiting[client]
            return True

    def close(self) -> list[T]:
        """End all waiting; return what there was."""
        with self._changed:
            self._is_closed = True
            left = [item for items in self._waiting.values() for item in items]
            self._waiting.clear()
            self._changed.notify_all()
            return left
