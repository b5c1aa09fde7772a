"""Bodies of requests: from bytes to checked fields, without delaying other requests.

The cost of a body stays in proportion to its size. Its shape is bounded before it is decoded, validation ends at the
first error, and a large body is decoded and validated beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
import pydantic
from starlette.requests import ClientDisconnect, Request

from card.errors import did_you_mean
from card.server.arrivals import Arrival, Arrivals
from card.server.config import ServerSettings
from card.server.errors import ApiError, bad_request
from card.server.shape import shape_of
from card.server.strict import Ignored, Strict, place_of

M = TypeVar("M", bound=Strict)
P = ParamSpec("P")
T = TypeVar("T")

# The second one is what curl, wget and Python send of any body unless they are told.
_JSON = ("application/json", "application/x-www-form-urlencoded")
LARGE_BYTES = 16 * 1024  # larger bodies are decoded and validated beside the event loop
MOST_SWALLOWED_BYTES = 64 * 1024 * 1024  # of a body that is too large, so that the client reads the error
_MOST_QUOTED_CHARS = 40  # of a wrong value in the message about it
_MOST_NAME_CHARS = 100  # of a field's name there


async def read_body(request: Request, model: type[M]) -> M:
    """Return the request's JSON body as a ``model``; a field that is null counts as absent.

    Unknown fields are left aside, unless the server is strict; `request.state.ignored` names them then.

    Raises: ApiError 415 for another content type or a compressed body, 413 for one that is too large, 408 for one that
        does not arrive, 400 for one that is not JSON or does not fit, with the field's name.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in _JSON and not content_type.endswith("+json"):
        raise ApiError(
            415, f"the content type must be application/json, got {content_type[:80] or 'none'}", code="content_type"
        )
    request.state.spelling = model.spelling
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"a body must not be compressed, got {encoding[:80]}; send plain JSON", code="content_encoding"
        )
    service, arrival = request.app.state.service, request.state.arrival
    arrivals = service.arrivals
    try:
        data = await _read_bytes(request)
        request.state.is_large = len(data) >= LARGE_BYTES
        ignored = None if service.settings.strict_fields else Ignored()
        body = await run_apart(request, _parsed, data, model, ignored)
        if ignored is not None and ignored.names:
            request.state.ignored = service.note_ignored([shown(name) for name in ignored.names])
        if not service.is_known(name := getattr(body, "model", "")):
            request.state.model = service.check_model(name)
        return body
    finally:
        arrivals.hold(arrival, -arrival.num_bytes)


async def run_apart(request: Request, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call ``function`` on a request's body or answer, beside the event loop if that is large; return its result."""
    if not request.state.is_large:
        return function(*args, **options)
    pool = request.app.state.service.body_threads
    return await asyncio.wrap_future(pool.submit(function, *args, **options))


def fitted(content: Mapping[str, Any], model: type[M], ignored: Ignored | None = None) -> M:
    """Return decoded JSON as a ``model``. Raises: ApiError 400.

    Args:
        ignored: takes the names of unknown fields; None refuses them.
    """
    try:
        return model.model_validate(content, context=ignored)
    except pydantic.ValidationError as error:
        raise _first_of(error, model) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def _parsed(data: bytearray, model: type[M], ignored: Ignored | None) -> M:
    if excess := shape_of(data).excess():
        raise bad_request(f"the body is {excess}", code="body_too_complex")
    try:
        content = msgspec.json.decode(data)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 at byte {error.start}") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    data.clear()  # only the fields are needed from here on
    if not isinstance(content, dict):
        raise bad_request(f"the body must be a JSON object, got {type(content).__name__}")
    return fitted(content, model, ignored)


async def _read_bytes(request: Request) -> bytearray:
    settings: ServerSettings = request.app.state.service.settings
    arrivals: Arrivals = request.app.state.service.arrivals
    arrival: Arrival = request.state.arrival
    limit_s, max_bytes = settings.body_timeout_s, settings.max_request_bytes
    stated = request.headers.get("content-length", "")
    num_stated = int(stated) if stated.isdecimal() else 0
    too_large = ApiError(413, f"the body may have at most {max_bytes} bytes", code="body_too_large")
    if num_stated > MOST_SWALLOWED_BYTES:
        raise too_large
    data, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > MOST_SWALLOWED_BYTES:
                    raise too_large
                if num_bytes <= max_bytes and num_stated <= max_bytes:
                    data += part
                else:
                    data.clear()
                arrivals.hold(arrival, len(data) - arrival.num_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limit_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise bad_request("the client hung up in the middle of its request") from None
    if num_bytes > max_bytes or num_stated > max_bytes:
        raise too_large
    return data


def _first_of(errors: pydantic.ValidationError, model: type[pydantic.BaseModel]) -> ApiError:
    listed = errors.errors(include_url=False, include_context=False)
    unknown = [one for one in listed if one["type"] == "extra_forbidden"]
    error = (unknown or listed)[0]
    param = shown(place_of(error["loc"]))
    if unknown:
        known = [one.alias or name for name, one in model.model_fields.items()] if len(error["loc"]) == 1 else []
        advice = did_you_mean(param, known) or "leave it out"
        return bad_request(f"{param} is not supported by this server; {advice}", param, "unsupported_parameter")
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    is_short = not isinstance(given, str) or len(given) <= _MOST_QUOTED_CHARS
    if isinstance(given, bool | int | float | str) and is_short and len(repr(given)) <= _MOST_QUOTED_CHARS:
        message += f", got {given!r}"
    return bad_request(f"{param}: {message}" if param else message, param or None)


def shown(name: str) -> str:
    """Return a field's name as one short line: a client may send any name."""
    short = name if len(name) <= _MOST_NAME_CHARS else name[:_MOST_NAME_CHARS] + "..."
    return short if short.isprintable() else repr(short)[1:-1]
