"""What has come of a request and was not read yet: between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from card.api.outputs import StreamChunk, stream_chunk
from card.engine.engine import Update
from card.errors import CardError, SettingsError
from card.workers.details import TokenDetails
from card.workers.metrics import RequestStats
from card.workers.request import FinishReason

Waiter = asyncio.Future[None]


class Mailbox:
    """What has come of one request and was not read yet: filled by the engine's thread, read in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._details: list[TokenDetails] = []
        self._stats: RequestStats | None = None  # set: there is something to read
        self._finish_reason: FinishReason | None = None
        self._error: CardError | None = None
        self._waiter: Waiter | None = None

    def put(self, text: str, update: Update) -> Waiter | None:
        """Add what a round gave. Returns: whom to wake."""
        with self._lock:
            if update.error is not None:
                self._error = update.error
            else:
                self._text.append(text)
                self._token_ids += update.token_ids
                self._details.append(update.details)
                self._stats, self._finish_reason = update.stats, update.finish_reason
            return self._waiter

    def fail(self, error: CardError) -> Waiter | None:
        """Let the reader get ``error`` after what there is to read. Returns: whom to wake."""
        with self._lock:
            self._error = error
            return self._waiter

    async def take(self) -> StreamChunk:
        """Return everything that is new, once there is something. Raises: the request's error."""
        if asyncio.get_running_loop() is not self.loop:
            raise SettingsError("a stream must be read in the event loop that it was made in")
        while True:
            with self._lock:
                if self._waiter is not None:
                    raise SettingsError("a stream is read by one task at a time; another one waits for it")
                if self._stats is not None:
                    ids, told = tuple(self._token_ids), TokenDetails.joined(self._details)
                    chunk = stream_chunk("".join(self._text), ids, self._finish_reason, self._stats, told)
                    self._text, self._token_ids, self._details, self._stats = [], [], [], None
                    return chunk
                if self._error is not None:
                    raise self._error
                waiter = self._waiter = self.loop.create_future()
            try:
                await waiter
            finally:
                with self._lock:
                    self._waiter = None


def wake(waiters: Sequence[tuple[asyncio.AbstractEventLoop, Waiter | None]]) -> None:
    """Wake readers, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for loop, waiter in waiters:
        if waiter is not None:
            by_loop.setdefault(loop, []).append(waiter)
    for loop, those in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop has no readers left
            loop.call_soon_threadsafe(_finish, those)


def _finish(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
