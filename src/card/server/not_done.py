"""Paths of other servers for what this one does not do: each is refused in one line, in its API's form of errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from card.server.errors import ApiError

_EMBEDDINGS = "makes no embeddings; send them to a server of an embedding model"
_RANKS = "ranks no documents; send them to a server of a reranking model"
_ADAPTERS = "loads no LoRA adapters; merge them into the model, and give that to card serve"
_MODELS = "serves the model that it was started with; give another one to card serve"
_NOT_DONE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings"), _EMBEDDINGS),
        **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"), _RANKS),
        **dict.fromkeys(("/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _ADAPTERS),
        **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), _MODELS),
        "/api/blobs/{digest}": _MODELS,
    }
)


def refuse_the_rest(app: FastAPI) -> None:
    """Add the paths that get one line."""
    for path in _NOT_DONE:
        methods = ["GET", "HEAD", "POST", "DELETE"]
        app.add_api_route(path, _refuse, methods=methods, response_model=None, include_in_schema=False)


async def _refuse(request: Request) -> Response:
    """Raises: ApiError 501, which clients are told not to repeat."""
    path: str = request.scope["route"].path
    message = f"{path.partition('{')[0]}: this server {_NOT_DONE[path]}"
    raise ApiError(501, message, code="not_done", is_worth_retrying=False)
