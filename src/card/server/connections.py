"""Limits of a connection: the time and size of a request's head, and the time for the client to read an answer.

uvicorn has none of them. A reverse proxy has, but the server is also used without one. No proxy helps against a client
that stops reading a stream, since the proxy then stops reading from us. So the server needs that limit itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from card.server.answers import error_response
from card.server.config import ServerSettings
from card.server.errors import ApiError
from card.server.http import HttpProtocol

_MOST_HEAD_BYTES = 64 * 1024  # of a request's line and headers; the parser itself has no bound


class ServerConfig(uvicorn.Config):
    """uvicorn's settings for an application of ours."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        super().__init__(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self.limits = settings


class LimitedProtocol(HttpProtocol):
    """One connection. It is closed if a request's head is late, or if the client does not read its answer."""

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._num_head_bytes = 0  # since the parser last completed something
        self._head_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None

    # ---- the head ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._watch_head()

    def parse(self, piece: memoryview) -> int:
        """Pass a piece to the parser, unless one head or trailer is already too long."""
        self._num_head_bytes += len(piece)
        num_taken = super().parse(piece)
        if self._num_head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the headers may have at most {_MOST_HEAD_BYTES} bytes", code="head_too_large"))
        return num_taken

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._num_head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Begin a chunk of a body, or the trailer."""
        self._num_head_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if (
            self.cycle is not None and self.cycle.response_complete
        ):  # its body was discarded; the next head gets its own time
            self._cancel_head_timer()

    def _watch_head(self) -> None:
        """Run a timer while the connection waits for the head of a request, or for the rest of a discarded body."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if not (self.is_in_head or is_answered):
            self._cancel_head_timer()
        elif self._head_timer is None:
            is_in_body = self.cycle is not None and self.cycle.more_body and not self.is_in_head
            limit_s = self._limits.body_timeout_s if is_in_body else self._limits.head_timeout_s
            self._head_timer = self.loop.call_later(limit_s, self._on_late_head)

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._watch_head()  # an answer to an earlier request is being sent and ends first
            return
        reason = f"no request arrived within {self._limits.head_timeout_s:g} s"
        self._refuse(ApiError(408, reason, code="head_timeout"))

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # ---- the answer -------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Wait for the next request; until its first byte comes, uvicorn's own limit holds."""
        super().on_response_complete()
        self._cancel_head_timer()
        if self.transport.is_closing():
            self._watch_taking()
        elif self.is_in_head:
            self._unset_keepalive_if_required()
            self._watch_head()

    def pause_writing(self) -> None:
        """Give the client limited time to read what was sent."""
        super().pause_writing()
        self._watch_taking()

    def resume_writing(self) -> None:
        """Continue: the client has read enough."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_abort_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_taking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_abort_timer()
        super().connection_lost(exc)

    def _watch_taking(self) -> None:
        """Abort the connection if the client does not read in time; closing would wait forever."""
        if self._abort_timer is None:
            self._abort_timer = self.loop.call_later(self._limits.body_timeout_s, self.transport.abort)

    def _cancel_abort_timer(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None

    # ---- refusals ---------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer in our own shape that a request is not HTTP."""
        self._refuse(ApiError(400, "the request is not valid HTTP", code="bad_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, unless an answer is being sent, and close."""
        self._cancel_head_timer()
        if self._answered is None or self._answered.response_complete or not self._answered.response_started:
            self.transport.write(refusal(error))
        self.transport.close()
        self._watch_taking()


def refusal(error: ApiError) -> bytes:
    """Return a complete answer that ends its connection."""
    response = error_response(error, Connection="close")
    lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", response.body])
