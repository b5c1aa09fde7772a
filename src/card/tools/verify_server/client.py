"""HTTP client of one server. Every fault is a `ServerError` of one line, raised within the time limit."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from card.errors import CardError
from card.tools.verify_server.settings import Address

_CONNECT_S = 10.0
_MOST_BYTES = 32 << 20  # of one answer
_MOST_CHARS = 200  # of what a server says of an error
_REFUSED = frozenset({400, 404, 405, 406, 410, 413, 415, 422, 501})  # what asking again would not change
_DONE = "[DONE]"


class ServerError(CardError):
    """A server or its answer cannot be used."""


class LostServerError(ServerError):
    """No connection, or no answer in time: further requests would only wait again."""


class BrokenAnswerError(ServerError):
    """An answer is no JSON, not of the API's shape, cut off, or an error of the server's own."""


class RefusedError(ServerError):
    """The server refuses this request."""

    def __init__(self, message: str, status: int, said: str) -> None:
        """Keep the server's words beside the whole line; status 200 if a field was accepted and ignored."""
        super().__init__(message)
        self.status = status
        self.said = said


class Client:
    """Connections to one server; an asynchronous context manager."""

    def __init__(self, address: Address, *, timeout_s: float, connections: int) -> None:
        self.url = address.url
        self._key = address.api_key
        self._timeout_s = timeout_s
        headers = {"User-Agent": "card-verify-server"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._http = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=min(_CONNECT_S, timeout_s)),  # the rest is bounded as a whole
            # No connection is used twice: a server may close an idle one just when the next request comes.
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """GET a JSON object, or POST ``body`` and return the answer. Raises: ServerError."""
        async with self._answered(path, body) as response:
            return self._object(await self._read(response), path)

    async def counters(self) -> dict[str, float]:
        """Return the server's Prometheus metrics, summed over their labels; empty if it has none."""
        url = re.sub(r"/v1$", "", self.url) + "/metrics"
        try:
            async with asyncio.timeout(self._timeout_s), self._http.stream("GET", url) as response:
                text = (await self._read(response)).decode("utf-8", "replace") if response.is_success else ""
        except (TimeoutError, httpx2.HTTPError, ServerError):
            return {}
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? ([\d.eE+-]+)", text, re.MULTILINE):
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
        return found

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a streamed answer, after its end. Raises: ServerError."""
        async with self._answered(path, body) as response:
            kind = response.headers.get("content-type", "")
            raw = await self._read(response)
        if not kind.startswith("text/event-stream"):
            self._object(raw, path)
            said = f"it answers stream: true with one answer of type {kind[:40] or 'none'}"
            raise RefusedError(f"{self.url}{path}: {said}", 200, said)
        return self._events(raw.decode("utf-8", "replace"), path)

    def _events(self, text: str, path: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for line in re.split(r"\r\n|\n|\r", text):
            if not line.startswith("data:"):
                continue  # a blank, a comment, the name of an event
            data = line.removeprefix("data:").strip()
            if data == _DONE:
                return events
            event = self._object(data.encode(), path)
            if "error" in event:
                raise BrokenAnswerError(f"{self.url}{path}: the stream ends with an error: {self._said(data)}")
            events.append(event)
        raise BrokenAnswerError(f"{self.url}{path}: the stream was cut off after {len(events)} events, before {_DONE}")

    @asynccontextmanager
    async def _answered(self, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx2.Response]:
        """Yield a successful response; reading it counts towards the time limit."""
        url, method = self.url + path, "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(self._timeout_s), self._http.stream(method, url, json=body) as response:
                if not response.is_success:
                    self._refuse(response, path, await self._read(response))
                yield response
        except TimeoutError:
            raise LostServerError(
                f"{url} did not answer within {self._timeout_s:g} seconds; look at the server, or raise --timeout"
            ) from None
        except httpx2.ConnectTimeout:
            problem = f"{url} cannot be reached within {_CONNECT_S:g} seconds; is the address right?"
            raise LostServerError(problem) from None
        except (httpx2.ConnectError, httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.ProxyError) as error:
            raise LostServerError(
                f"{url} cannot be reached: {self._clean(str(error)) or type(error).__name__}; is the server up, "
                "and the address right?"
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise BrokenAnswerError(
                f"{url}: the answer was cut off: {self._clean(str(error)) or type(error).__name__}"
            ) from None

    async def _read(self, response: httpx2.Response) -> bytes:
        parts, size = [], 0
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > _MOST_BYTES:
                raise BrokenAnswerError(f"{response.url}: the answer is longer than {_MOST_BYTES >> 20} MiB")
        return b"".join(parts)

    def _refuse(self, response: httpx2.Response, path: str, raw: bytes) -> None:
        status, said = response.status_code, self._said(raw.decode("utf-8", "replace"))
        where = f"{self.url}{path}"
        if status in (401, 403):
            what = "refuses the API key" if self._key is not None else "wants an API key"
            raise LostServerError(f"{where} {what} (status {status}): {said}; give it by --api-key or its variable")
        if response.is_redirect:
            place = self._clean(response.headers.get("location", ""))
            raise LostServerError(f"{where} leads to {place} (status {status}); give the address that it leads to")
        if status in _REFUSED:
            raise RefusedError(f"{where} answers status {status}: {said}", status, said)
        raise BrokenAnswerError(f"{where} answers status {status}: {said}")

    def _object(self, raw: bytes, path: str) -> dict[str, Any]:
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            begin = self._clean(raw[:_MOST_CHARS].decode("utf-8", "replace"))
            raise BrokenAnswerError(f"{self.url}{path}: the answer is no JSON: {begin[:60]!r}") from None
        if not isinstance(content, dict):
            raise BrokenAnswerError(f"{self.url}{path}: the answer is no JSON object but {type(content).__name__}")
        return content

    def _said(self, text: str) -> str:
        try:
            content: Any = json.loads(text)
        except (ValueError, RecursionError):
            content = text
        for name in ("error", "message", "detail"):
            if isinstance(content, dict) and name in content:
                content = content[name]
        return self._clean(content if isinstance(content, str) else json.dumps(content)) or "nothing more"

    def _clean(self, text: str) -> str:
        """Return a server's words as one short line for a terminal, without our key."""
        if self._key is not None:
            text = text.replace(self._key, "***")
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}…"
