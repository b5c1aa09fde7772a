"""Sending answers as server-sent events while they are written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from card.errors import CardError
from card.server.answers import error_content, event
from card.server.errors import as_api_error
from card.server.generation import Generation
from card.server.http import PROBE

DONE = b"data: [DONE]\n\n"
_COMMENT = b":\n\n"  # a comment in a stream of events, which readers ignore


def failure(error: CardError) -> bytes:
    """Return the event for an error."""
    return event(error_content(as_api_error(error)))


async def with_pings(
    events: AsyncIterator[bytes], interval_s: float, comment: bytes = _COMMENT
) -> AsyncIterator[bytes]:
    """Yield events, and a comment after each interval without any, as while a prompt is read; 0 yields no comments.

    Clients and proxies give up on a connection on which nothing moves.
    """
    while True:
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({coming}, timeout=interval_s or None))[0]:
                yield comment
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
        tell: Callable[[CardError], bytes] = failure,
        end: bytes = DONE,
        comment: bytes = _COMMENT,
        media_type: str = "text/event-stream",
    ) -> None:
        """Send the text of ``generation``, which is closed at the end.

        Args:
            events: all but the last ones of the stream.
            tell: makes the event for an error.
            end: sent last.
            comment: bytes that readers ignore between two events.
            media_type: of the stream.
        """
        no_buffering = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # by caches and by nginx
        super().__init__(events, media_type=media_type, headers=no_buffering)
        self._generation, self._events = generation, events
        self._tell, self._end, self._comment = tell, end, comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the answer. A client may have gone before it begins."""
        scope["state"][PROBE] = self._comment
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.close()

    async def stream_response(self, send: Send) -> None:
        """Send the answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._generation.arrival.deadline, contextlib.aclosing(self._events):
                async for piece in with_pings(self._events, self._generation.ping_interval_s, self._comment):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except CardError as error:
            await self._generation.close()  # first, so that a client that does not read holds no place
            await send({"type": "http.response.body", "body": self._tell(error), "more_body": True})
        await self._generation.close()
        await send({"type": "http.response.body", "body": self._end, "more_body": False})
