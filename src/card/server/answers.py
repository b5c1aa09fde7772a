"""Writing answers: as JSON, as server-sent events, and errors in the shape of the API that was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from card.server.anthropic.errors import message_error
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


# What begins the paths of APIs whose errors have another shape, and their content there.
_OTHER_SHAPES: Mapping[str, Callable[[ApiError], dict[str, Any]]] = MappingProxyType(
    {"/v1/messages": message_error, "/api/": lambda error: {"error": str(error)}}  # Anthropic's, Ollama's
)


class ErrorResponse(Response):
    """An error in OpenAI's shape, unless the path that was asked belongs to an API with another one."""

    def __init__(self, error: ApiError, headers: Mapping[str, str]) -> None:
        """Report ``error``, with these headers and its own."""
        self._error, self._error_headers = error, error.headers() | dict(headers)
        super().__init__(_encode(error_content(error)), error.status, self._error_headers, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = next((shape for path, shape in _OTHER_SHAPES.items() if scope["path"].startswith(path)), None)
        if content is None:
            await super().__call__(scope, receive, send)
            return
        other = json_response(content(self._error), self._error.status, self._error_headers)
        await other(scope, receive, send)


def error_response(error: ApiError, **headers: str) -> Response:
    """Return an error as an answer, with its own headers and these."""
    return ErrorResponse(error, headers)
