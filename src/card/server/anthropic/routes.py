"""The paths of Anthropic's API."""

from __future__ import annotations

from functools import partial

from card.server.anthropic.messages import count_tokens, messages
from card.server.anthropic.schemas import CountRequest, MessagesRequest
from card.server.openapi import OF_BODIES, OF_WRITING, Route

_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
    },
}
_route = partial(Route, error=_ERROR)

ROUTES = (
    _route("/v1/messages", messages, OF_WRITING, MessagesRequest),
    _route("/v1/messages/count_tokens", count_tokens, OF_BODIES, CountRequest),
)
