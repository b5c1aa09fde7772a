"""The paths of Anthropic's API."""

from __future__ import annotations

from card.server.anthropic.messages import count_tokens, messages
from card.server.anthropic.schemas import CountRequest, MessagesRequest
from card.server.openapi import OF_BODIES, OF_WRITING, Route

ROUTES = (
    Route("/v1/messages", messages, OF_WRITING, MessagesRequest),
    Route("/v1/messages/count_tokens", count_tokens, OF_BODIES, CountRequest),
)
