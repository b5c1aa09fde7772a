"""Sending answers as server-sent events while they are written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from card.errors import CardError
from card.server.answers import error_content, event
from card.server.errors import ApiError, as_api_error
from card.server.generation import Generation
from card.server.http import PROBE

DONE = b"data: [DONE]\n\n"
_PROGRESS_S = 1.0  # between two events of it
_COMMENT = b":\n\n"  # a comment in a stream of events, which readers ignore


def failure(error: ApiError) -> bytes:
    """Return the event for an error."""
    return event(error_content(error))


async def with_pings(
    events: AsyncIterator[bytes], interval_s: float, say: Callable[[], bytes] = lambda: _COMMENT
) -> AsyncIterator[bytes]:
    """Yield events, and what ``say`` returns after each interval without any, as while a prompt is read; 0: nothing.

    Clients and proxies give up on a connection on which nothing moves.
    """
    while True:
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({coming}, timeout=interval_s or None))[0]:
                yield say()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})  # before its generator is closed
        if (piece := coming.result()) is None:
            return
        yield piece


class EventStream(StreamingResponse):
    """Sends the text of a generation. A client that disconnects ends it; an error becomes the last event."""

    def __init__(
        self,
        generation: Generation,
        events: AsyncGenerator[bytes, None],
        *,
        tell: Callable[[ApiError], bytes] = failure,
        end: bytes = DONE,
        comment: bytes = _COMMENT,
        head: dict[str, Any] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        """Send the text of ``generation``, which is closed at the end.

        Args:
            events: all but the last ones of the stream.
            tell: makes the event for an error.
            end: sent last.
            comment: bytes that readers ignore between two events.
            head: fields of an event that says how far the prompt is read; None: there is none.
            media_type: of the stream.
        """
        no_buffering = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # by caches and by nginx
        super().__init__(events, media_type=media_type, headers=no_buffering)
        self._generation, self._events = generation, events
        self._tell, self._end, self._comment, self._head = tell, end, comment, head
        self._spelling: Mapping[str, str] = {}  # known once the request is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the answer. A client may have gone before it begins."""
        scope["state"][PROBE] = self._comment
        self._spelling = scope["state"].get("spelling", {})
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.close()

    async def stream_response(self, send: Send) -> None:
        """Send the answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._generation.arrival.deadline, contextlib.aclosing(self._events):
                async for piece in with_pings(self._events, self._interval_s(), self._break_silence):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except CardError as error:
            api_error = as_api_error(error, self._spelling)
            await self._generation.close()  # first, so that a client that does not read holds no place
            await send({"type": "http.response.body", "body": self._tell(api_error), "more_body": True})
        await self._generation.close()
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    def _interval_s(self) -> float:
        """Return the seconds of silence before something is said."""
        interval_s = self._generation.ping_interval_s
        tells = self._head is not None and self._generation.tells_progress
        return min(interval_s or _PROGRESS_S, _PROGRESS_S) if tells else interval_s

    def _break_silence(self) -> bytes:
        """Return how far the prompt is read, if the client wants to know, else a comment."""
        if self._head is None or not self._generation.tells_progress or (read := self._generation.progress()) is None:
            return self._comment
        return event({**self._head, "choices": [], "prompt_progress": read})
