"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Any

from card.server.errors import ApiError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an answer, or of a stream's event, that reports ``error``."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
