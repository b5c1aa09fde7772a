"""Answers to Ollama's clients about the model, and refusals of what this server does not do."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from card import __version__
from card.server.answers import json_response
from card.server.bodies import read_body
from card.server.errors import ApiError
from card.server.ollama.schemas import OllamaShowRequest
from card.server.service import USUAL_TAG, Service

_API_VERSION = "0.13.0"  # the release of Ollama whose API this is: clients refuse old ones
_ARCHITECTURE = "card"  # prefix of the model's figures
_NO_EMBEDDINGS = "makes no embeddings; send them to a server of an embedding model"
_ONE_MODEL = "serves the model that it was started with; give another one to card serve"
_NOT_DONE = {
    "/api/embed": _NO_EMBEDDINGS,
    "/api/embeddings": _NO_EMBEDDINGS,
    **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), _ONE_MODEL),
    "/api/blobs/{digest}": _ONE_MODEL,
}


async def tags(request: Request) -> Response:
    """List the names under which the model is served, with a tag, as Ollama has them."""
    service: Service = request.app.state.service
    return json_response({"models": [_listed(service, name) for name in service.settings.served_model_names]})


async def running(request: Request) -> Response:
    """List what is loaded: the same, for ever."""
    service: Service = request.app.state.service
    names = service.settings.served_model_names
    beside = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": service.llm.max_model_len}
    return json_response({"models": [{**_listed(service, name), **beside} for name in names]})


async def show(request: Request) -> Response:
    """Describe the model."""
    service: Service = request.app.state.service
    fields = await read_body(request, OllamaShowRequest)
    service.check_model(fields.model or fields.name, must_be_known=True)
    host = service.llm.host
    size = host.runner.original
    able = {
        "completion": True,
        "tools": host.answers.writes_calls,
        "thinking": host.answers.form.thoughts is not None,
        "insert": service.infill is not None,
        "vision": host.settings.max_images > 0,
    }
    return json_response(
        {
            "modelfile": "",
            "parameters": f"num_ctx {service.llm.max_model_len}",
            "template": host.answers.template,
            "details": _details(service),
            "model_info": {
                "general.architecture": _ARCHITECTURE,
                "general.parameter_count": size.num_parameters,
                f"{_ARCHITECTURE}.context_length": service.llm.max_model_len,
                f"{_ARCHITECTURE}.block_count": size.num_layers,
                f"{_ARCHITECTURE}.embedding_length": size.hidden_size,
            },
            "capabilities": [name for name, is_able in able.items() if is_able],
            "modified_at": _since(service),
        }
    )


async def version(request: Request) -> Response:
    """Report the version of the API, by Ollama's count, and ours."""
    return json_response({"version": _API_VERSION, "card": __version__})


def refuse_the_rest(app: FastAPI) -> None:
    """Add the paths of Ollama that get one line."""
    for path in _NOT_DONE:
        methods = ["POST", "DELETE", "HEAD"]
        app.add_api_route(path, _not_done, methods=methods, response_model=None, include_in_schema=False)


async def _not_done(request: Request) -> Response:
    """Refuse. Raises: ApiError 501."""
    path: str = request.scope["route"].path
    raise ApiError(501, f"{path.partition('{')[0]}: this server {_NOT_DONE[path]}", code="not_done")


def _since(service: Service) -> str:
    return datetime.fromtimestamp(service.started_at, UTC).isoformat().replace("+00:00", "Z")


def _listed(service: Service, name: str) -> dict[str, Any]:
    tagged = name if ":" in name else name + USUAL_TAG
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _since(service),
        "size": 0,  # the bytes of its files, which nothing here knows
        "digest": hashlib.sha256(name.encode()).hexdigest(),  # of the name: clients show its first letters
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    runner = service.llm.host.runner
    return {
        "parent_model": "",
        "format": "card",
        "family": _ARCHITECTURE,
        "families": [_ARCHITECTURE],
        "parameter_size": f"{runner.original.num_parameters / 1e6:.1f}M",
        "quantization_level": runner.precision,
    }
