"""Unread output of a request: between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from card.api.outputs import AnswerText, StreamChunk
from card.engine.request import Update
from card.errors import CardError, SettingsError


class Mailbox:
    """Unread output of one request. All of it happens in one event loop; see `post`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._text = AnswerText()
        self._updates: list[Update] = []
        self._error: CardError | None = None  # raised after everything else is read
        self._waiter: asyncio.Future[None] | None = None

    def put(self, text: AnswerText, update: Update) -> None:
        """Add a round's result with the text that became certain, or the error that ends it; wake the reader."""
        if update.error is not None:
            self._error = update.error
        else:
            self._text += text
            self._updates.append(update)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> StreamChunk:
        """Return everything new, once there is something. Raises: the request's error."""
        if asyncio.get_running_loop() is not self.loop:
            raise SettingsError("a stream must be read in the event loop that it was made in")
        if self._waiter is not None:
            raise SettingsError("a stream is read by one task at a time; another task is already reading it")
        if not self._updates and self._error is None:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._updates and self._error is not None:
            raise self._error
        chunk = StreamChunk.of(self._text, self._updates)
        self._text, self._updates = AnswerText(), []
        return chunk


def post(letters: Sequence[tuple[Mailbox, AnswerText, Update]]) -> None:
    """Put each letter into its mailbox from another thread, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, AnswerText, Update]]] = {}
    for letter in letters:
        by_loop.setdefault(letter[0].loop, []).append(letter)
    for loop, those in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop has no readers left
            loop.call_soon_threadsafe(_put_all, those)


def _put_all(letters: Sequence[tuple[Mailbox, AnswerText, Update]]) -> None:
    for mailbox, text, update in letters:
        mailbox.put(text, update)
