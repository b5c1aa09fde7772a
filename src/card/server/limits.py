"""Limits of the server: size of a body, requests that wait, time of a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import msgspec
import pydantic
from starlette.requests import ClientDisconnect, Request

from card.server.config import ServerSettings
from card.server.errors import ApiError, bad_request, shutting_down

M = TypeVar("M", bound=pydantic.BaseModel)

_MOST_SWALLOWED_BYTES = 64 * 1024 * 1024  # of a body that is too large, so that the client reads why it was refused
_MOST_RETRY_AFTER_S = 60
_MOST_QUOTED_CHARS = 40  # of a wrong value in the message about it


async def read_body(request: Request, model: type[M]) -> M:
    """Return the request's JSON body as a ``model``; a field that is null counts as left out.

    Raises: ApiError 415 for another content type, 413 for a body that is too large, 408 for one that does not come, 400
        for one that is no JSON or does not fit, with the field's name.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(
            415, f"the content type must be application/json, got {content_type[:80] or 'none'}", code="content_type"
        )
    data = await _read_bytes(request)
    try:
        content = msgspec.json.decode(data)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 at byte {error.start}") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise bad_request(f"the body must be a JSON object, got {type(content).__name__}")
    return fitted(content, model)


def fitted(content: Mapping[str, Any], model: type[M]) -> M:
    """Return decoded JSON as a ``model``. Raises: ApiError 400."""
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        raise _first_of(error) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


async def _read_bytes(request: Request) -> bytes:
    settings: ServerSettings = request.app.state.service.settings
    limit_s, max_bytes = settings.body_timeout_s, settings.max_request_bytes
    stated = request.headers.get("content-length", "")
    num_stated = int(stated) if stated.isdecimal() else 0
    too_large = ApiError(413, f"the body may have at most {max_bytes} bytes", code="body_too_large")
    if num_stated > _MOST_SWALLOWED_BYTES:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > _MOST_SWALLOWED_BYTES:
                    raise too_large
                if num_bytes <= max_bytes and num_stated <= max_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limit_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise bad_request("the client hung up in the middle of its request") from None
    if num_bytes > max_bytes or num_stated > max_bytes:
        raise too_large
    return b"".join(parts)


def _first_of(errors: pydantic.ValidationError) -> ApiError:
    """Return what is wrong first, in one line."""
    listed = errors.errors(include_url=False, include_context=False)
    unknown = [one for one in listed if one["type"] == "extra_forbidden"]
    error = (unknown or listed)[0]
    param = ".".join(str(part) for part in error["loc"])
    if unknown:
        return bad_request(f"{param} is not supported by this server; leave it out", param, "unsupported_parameter")
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    if isinstance(given, bool | int | float | str) and len(repr(given)) <= _MOST_QUOTED_CHARS:
        message += f", got {given!r}"
    return bad_request(f"{param}: {message}" if param else message, param or None)


class Gate:
    """Lets so many sequences in as may run and wait, and none while the server shuts down."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._most = max_running + max_waiting
        self._inside: dict[object, tuple[int, float]] = {}  # ticket -> sequences, when they came in
        self._mean_s = 1.0  # of a request
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.is_open = True  # until the server shuts down

    @property
    def num_requests(self) -> int:
        """Requests that are being answered."""
        return len(self._inside)

    def enter(self, num_sequences: int) -> object:
        """Let a request in; return its ticket.

        Raises: ApiError 503 while shutting down, 429 if there is no room now, 400 if never.
        """
        num_inside = sum(count for count, _ in self._inside.values())
        if not self.is_open:
            raise shutting_down()
        if num_sequences > self._most:
            raise bad_request(f"a request may ask for at most {self._most} texts, got {num_sequences}", "n")
        if num_inside + num_sequences > self._most:
            raise ApiError(
                429,
                f"the queue is full: {num_inside} texts are being written or wait, at most {self._most} may",
                code="queue_full",
                retry_after_s=self._retry_after_s(num_inside),
            )
        ticket = object()
        self._inside[ticket] = num_sequences, asyncio.get_running_loop().time()
        self._is_empty.clear()
        return ticket

    def leave(self, ticket: object) -> None:
        """Take the ticket back."""
        _, entered_at = self._inside.pop(ticket)
        self._mean_s += 0.1 * (asyncio.get_running_loop().time() - entered_at - self._mean_s)
        if not self._inside:
            self._is_empty.set()

    async def until_empty(self) -> None:
        """Wait until the last request has left."""
        await self._is_empty.wait()

    def _retry_after_s(self, num_inside: int) -> int:
        """Return when a place should come free: those who wait are served at the pace of the last requests."""
        num_waiting = max(1, num_inside - self._max_running)
        return min(_MOST_RETRY_AFTER_S, max(1, math.ceil(self._mean_s * num_waiting / self._max_running)))


class Deadline:
    """Ends what runs under it with an ApiError: when its time is up, or at once when it is cut short."""

    def __init__(self, seconds: float) -> None:
        self._at = asyncio.get_running_loop().time() + seconds
        self._reason = ApiError(
            503,
            f"the request took longer than the {seconds:g} s that this server allows; ask for less",
            code="request_timeout",
            retry_after_s=1,
            is_worth_retrying=False,
        )
        self._timeout: asyncio.Timeout | None = None

    def cut(self, reason: ApiError) -> None:
        """End it now."""
        loop = asyncio.get_running_loop()
        self._reason, self._at = reason, loop.time()
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._at)

    async def __aenter__(self) -> Self:
        self._timeout = asyncio.timeout_at(self._at)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        assert self._timeout is not None
        timeout, self._timeout = self._timeout, None
        try:
            await timeout.__aexit__(*failure)
        except TimeoutError:
            raise self._reason from None
