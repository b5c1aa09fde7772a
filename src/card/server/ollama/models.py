"""Answers to Ollama's clients about the model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card import __version__
from card.errors import ModelError
from card.models.files.file_facts import FileFacts, file_facts
from card.server.answers import json_response
from card.server.bodies import read_body
from card.server.ollama.schemas import OllamaShowRequest
from card.server.service import USUAL_TAG, Service

_API_VERSION = "0.13.0"  # the release of Ollama whose API this is: clients refuse old ones
_ARCHITECTURE = "card"  # of a model without files


async def tags(request: Request) -> Response:
    """List the names under which the model is served, with a tag, as Ollama has them."""
    service: Service = request.app.state.service
    facts = await _facts(service)
    return json_response({"models": [_listed(service, facts, name) for name in service.settings.served_model_names]})


async def running(request: Request) -> Response:
    """List what is loaded: the same, for ever."""
    service: Service = request.app.state.service
    names, facts = service.settings.served_model_names, await _facts(service)
    beside = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": service.llm.max_model_len}
    return json_response({"models": [{**_listed(service, facts, name), **beside} for name in names]})


async def show(request: Request) -> Response:
    """Describe the model."""
    service: Service = request.app.state.service
    fields = await read_body(request, OllamaShowRequest)
    service.check_model(fields.model or fields.name, must_be_known=True)
    host = service.llm.host
    size, facts = host.runner.original, await _facts(service)
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
            "details": _details(service, facts),
            "model_info": {
                "general.architecture": facts.family,
                "general.parameter_count": size.num_parameters,
                f"{facts.family}.context_length": service.llm.max_model_len,
                f"{facts.family}.block_count": size.num_layers,
                f"{facts.family}.embedding_length": size.hidden_size,
            },
            "capabilities": [name for name, is_able in able.items() if is_able],
            "modified_at": _modified(facts),
        }
    )


async def version(request: Request) -> Response:
    """Report the version of the API, by Ollama's count, and ours."""
    return json_response({"version": _API_VERSION, "card": __version__})


async def _facts(service: Service) -> FileFacts:
    """Return the facts of the target's files; of a model that was given as an object, or whose files are gone, ours."""
    try:
        facts = await service.run_in_thread(True, file_facts, service.llm.host.settings.target)
    except (ModelError, OSError, ValueError):
        facts = None
    precision, names = service.llm.host.runner.precision, service.settings.served_model_names
    digest = hashlib.sha256(names[0].encode()).hexdigest()
    return facts or FileFacts(_ARCHITECTURE, _ARCHITECTURE, precision, 0, digest, service.started_at)


def _modified(facts: FileFacts) -> str:
    return datetime.fromtimestamp(facts.modified_at, UTC).isoformat().replace("+00:00", "Z")


def _listed(service: Service, facts: FileFacts, name: str) -> dict[str, Any]:
    tagged = name if ":" in name else name + USUAL_TAG
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _modified(facts),
        "size": facts.num_bytes,
        "digest": facts.digest,
        "details": _details(service, facts),
    }


def _details(service: Service, facts: FileFacts) -> dict[str, Any]:
    num_parameters = service.llm.host.runner.original.num_parameters
    number = f"{num_parameters / 1e9:.1f}B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.1f}M"
    return {
        "parent_model": "",
        "format": facts.form,
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": number,
        "quantization_level": facts.quantization,
    }
