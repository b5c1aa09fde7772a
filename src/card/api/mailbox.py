"""Unread output of a request: between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from card.api.outputs import AnswerText, StreamChunk
from card.engine.request import Update
from card.errors import CardError, SettingsError

# As Python's own count of memory has them.
_UPDATE_BYTES, _LOGPROB_BYTES, _TOP_BYTES = 400, 128, 112


def logprob_bytes(num_tokens: int, num_top: int) -> int:
    """Return about how many bytes the log-probabilities of some tokens take, each with others beside it."""
    return num_tokens * (_LOGPROB_BYTES + num_top * _TOP_BYTES)


class Mailbox:
    """Unread output of one request. All of it happens in one event loop; see `post`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._text = AnswerText()
        self._updates: list[Update] = []
        self._error: CardError | None = None  # raised after everything else is read
        self._waiter: asyncio.Future[None] | None = None
        self._num_bytes = 0  # about so many are unread
        self.tell: Callable[[int], None] = lambda _: None  # gets how many more, or fewer, there are

    def put(self, text: AnswerText, update: Update) -> None:
        """Add a round's result with the text that became certain, or the error that ends it; wake the reader."""
        if update.error is not None:
            self._error = update.error
        else:
            self._text += text
            self._updates.append(update)
            self._count(len(text.text) + _bytes_of(update))
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
        self.clear()
        return chunk

    def clear(self) -> None:
        """Drop what is unread."""
        self._text, self._updates = AnswerText(), []
        self._count(-self._num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self.tell(num_bytes)


def _bytes_of(update: Update) -> int:
    details = update.details
    num_top = sum([len(one.top) for one in details.logprobs]) + sum(map(len, details.alternatives))
    return _UPDATE_BYTES + len(details.logprobs) * _LOGPROB_BYTES + num_top * _TOP_BYTES


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
