"""Writing answers: as JSON, as server-sent events, and errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from card.server.errors import ApiError

_encode = msgspec.json.Encoder().encode


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    return Response(_encode(content), status, headers, "application/json")


def event(content: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encode(content) + b"\n\n"


def error_content(error: ApiError) -> dict[str, Any]:
    """Return the body of an answer, or of a stream's event, that reports ``error``."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError, **headers: str) -> Response:
    """Return an error as an answer, with its own headers and these."""
    return json_response(error_content(error), error.status, error.headers() | headers)
