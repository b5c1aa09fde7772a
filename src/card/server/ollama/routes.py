"""The paths of Ollama's API."""

from __future__ import annotations

from functools import partial

from card.server.ollama.models import running, show, tags, version
from card.server.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from card.server.ollama.writing import chat, generate_text
from card.server.openapi import OF_BODIES, OF_WRITING, Route

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_route = partial(Route, stream="application/x-ndjson", error=_ERROR)

ROUTES = (
    _route("/api/chat", chat, OF_WRITING, OllamaChatRequest),
    _route("/api/generate", generate_text, OF_WRITING, OllamaGenerateRequest),
    _route("/api/show", show, OF_BODIES, OllamaShowRequest),
    _route("/api/tags", tags, (401,)),
    _route("/api/ps", running, (401,)),
    _route("/api/version", version, (401,)),
)
