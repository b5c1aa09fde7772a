"""HTTP/1 on top of uvicorn, with these additions.

- An upgrade that is not supported is ignored; the request is served with its body.
- A client that closes its side after a request still gets the answer; a client that is gone is noticed.
- An HTTP/1.0 client gets a body of unknown length without chunks, ended by closing.
- A connection is closed only after the client has stopped sending; otherwise it may lose an answer it has not read.
- Only a few pipelined requests are read before they are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

PROBE = "probe"  # in the state of a request: bytes without meaning that may be sent between two pieces of its answer
_SLICE_BYTES = 4096  # passed to the parser at once, which bounds the requests read ahead
_MOST_AT_ONCE_BYTES = 64 * 1024  # read before the event loop does other work
_MOST_UNREAD_BYTES = 64 * 1024  # that wait after an unanswered request
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE_S, _LAST_PROBE_S = 0.02, 30.0  # first and longest pause between checks of a client that closed its side
_MOST_SWALLOWED_BYTES = 64 * 1024 * 1024  # discarded after the answer that ends a connection
_SILENCE_S = 1.0  # after which a client counts as done sending


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    transport: LingeringTransport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_in_head = False  # the parser has begun a request and not come to the end of its headers
        self.unread = b""  # bytes that came after a request that is not answered yet
        self._method = b""
        self._has_upgrade = False  # the present headers ask for one
        self._answered: RequestResponseCycle | None = None  # the request that the application answers
        self._has_eof = False  # the client sends nothing more
        self._probe_timer: asyncio.TimerHandle | None = None

    @property
    def is_receiving(self) -> bool:
        """True if the client has begun a request and may still be sending it."""
        return self.is_in_head or bool(self.unread) or (self.cycle is not None and self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(LingeringTransport(transport, self))
        self.flow = _Flow(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application, even if the client has sent further requests since."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self.transport.forget()
        self.unread = b""
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read the data, unless an unanswered request comes first."""
        if self.transport.is_closing():
            self.transport.swallow(len(data))
            return
        self._unset_keepalive_if_required()
        self.unread += data
        self._read_on()

    def _read_on(self) -> None:
        """Read some of the data; the rest after a turn of the event loop, or when a request is answered."""
        view, start = memoryview(self.unread), 0
        end = min(len(view), _MOST_AT_ONCE_BYTES)
        while start < end and not self.pipeline and not self.transport.is_closing():
            start += self.parse(view[start : min(end, start + _SLICE_BYTES)])
        self.unread = b"" if self.transport.is_closing() else bytes(view[start:])
        if self.unread and not self.pipeline:
            self.loop.call_soon(self._read_rest)
        if len(self.unread) >= _MOST_UNREAD_BYTES:
            self.flow.pause_reading()
        elif self.pipeline:  # so that a closed connection is noticed
            self.flow.resume_reading()

    def _read_rest(self) -> None:
        if not self.unread or self.pipeline or self.transport.is_closing():
            return
        self._read_on()
        if not self.unread and not self._is_body_full():
            self.flow.resume_reading()
        if self._has_eof:
            self._end_after_last()

    def _is_body_full(self) -> bool:
        """Return whether the application must read some of the body first."""
        return self.cycle is not None and not self.cycle.response_complete and len(self.cycle.body) > HIGH_WATER_LIMIT

    def parse(self, piece: memoryview) -> int:
        """Pass a piece to the parser; return how much of it was read."""
        try:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as stopped:
                self._read_without_upgrade()
                return int(stopped.args[0])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        return len(piece)

    def _read_without_upgrade(self) -> None:
        """Parse the headers again without the upgrade, which made the parser stop."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self._method, self.url, version)]
        lines += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self._has_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"".join([*lines, b"\r\n"]))

    def on_message_begin(self) -> None:
        """Begin to read headers."""
        self.is_in_head, self._has_upgrade = True, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header. Those after a chunked body are ignored."""
        if self.is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the answer, unless the parser would read the rest as another protocol."""
        self._method = self.parser.get_method()
        self._has_upgrade = self.parser.should_upgrade() and self._method != b"CONNECT"
        if not self._has_upgrade:
            self.is_in_head = False
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the body, also a discarded one."""
        if not self._has_upgrade:
            super().on_message_complete()
            self.cycle.more_body = False

    # ---- answering --------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] in ("0.9", "1.0"):
            app = _EndedByClosing(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Continue with the data that came meanwhile."""
        super().on_response_complete()
        self._read_rest()
        if self._has_eof:
            self._end_after_last()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while complete requests wait for their answers and the client is connected.

        A client that is gone looks the same; it answers data with a reset. An HTTP/1.0 client cannot be sent anything
        before its answer, so it counts as gone.
        """
        while self.unread and not self.pipeline:
            self._read_on()
        if self.transport.is_closing():
            self.transport.close_now()
            return False
        one = self._answered
        if one is None or one.response_complete or one.more_body or one.scope["http_version"] != "1.1":
            return False
        self._has_eof = True
        self._end_after_last()
        self._probe_client(_FIRST_PROBE_S)
        return True

    def _end_after_last(self) -> None:
        """End the connection after the last answer to a client that has closed its side."""
        if self.pipeline or self.unread:
            return
        if self.cycle.response_complete or self.cycle.more_body:
            self.transport.close_now()
        self.cycle.keep_alive = False

    def _probe_client(self, next_s: float) -> None:
        """Abort if the client has reset the connection; otherwise send it bytes without meaning."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        one = self._answered
        if one is not None and not one.response_started:
            self.transport.write(_CONTINUE)
        elif one is not None and not one.response_complete and (probe := one.scope["state"].get(PROBE)):
            self.transport.write(b"%x\r\n%b\r\n" % (len(probe), probe))
        self._probe_timer = self.loop.call_later(next_s, self._probe_client, min(5 * next_s, _LAST_PROBE_S))


class LingeringTransport(asyncio.Transport):
    """The transport of a protocol; it closes so that the client can read everything it was sent.

    A system answers data on a closed connection with a reset. The client may then lose what it has not read, and its
    sending fails. So while a client sends, only our side is closed, and its data is discarded until it stops.
    """

    def __init__(self, inner: asyncio.Transport, protocol: HttpProtocol) -> None:
        super().__init__()
        self._inner, self._protocol = inner, protocol
        self._num_swallowed = 0
        self._was_silent = False
        self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close once the client has stopped sending."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._protocol.is_receiving and not self._inner.is_closing():
            with contextlib.suppress(OSError):  # the client is gone
                self._inner.write_eof()
            self._protocol.pipeline.clear()
            self._protocol.unread = b""
            self._protocol.flow.resume_reading()
            self._watch_silence()
        else:
            self._inner.close()

    def close_now(self) -> None:
        """Close now, even if the client still sends."""
        self._is_closing = True
        self.forget()
        self._inner.close()

    def swallow(self, num_bytes: int) -> None:
        """Count bytes that came too late."""
        self._num_swallowed += num_bytes
        self._was_silent = False
        if self._num_swallowed > _MOST_SWALLOWED_BYTES:
            self.close_now()

    def _watch_silence(self) -> None:
        if self._was_silent:
            self.close_now()
            return
        self._was_silent = True
        self._timer = self._protocol.loop.call_later(_SILENCE_S, self._watch_silence)

    def forget(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def is_closing(self) -> bool:
        """Return whether nothing more may be sent."""
        return self._is_closing or self._inner.is_closing()

    def abort(self) -> None:
        """Close and drop what was not sent."""
        self._is_closing = True
        self._inner.abort()

    def write(self, data: Any) -> None:
        """Send."""
        self._inner.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the connection."""
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Stop reading from the client."""
        if not self._inner.is_closing():
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if not self._inner.is_closing():
            self._inner.resume_reading()


class _Flow(FlowControl):
    """Stops reading while much data waits for the answer to another request."""

    def __init__(self, protocol: HttpProtocol) -> None:
        super().__init__(protocol.transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if len(self._protocol.unread) < _MOST_UNREAD_BYTES:
            super().resume_reading()


class _EndedByClosing:
    """An application in which a body of unknown length ends with the connection."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    self._cycle.chunked_encoding = False
            elif not has_length:
                self._cycle.expected_content_length = len(message.get("body", b""))  # its actual length
            await send(message)

        await self._app(scope, receive, send_plain)
