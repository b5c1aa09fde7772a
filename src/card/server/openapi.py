"""Additions to `/openapi.json`: bodies, errors and limits that the framework does not know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from card.config.sampling import MAX_CHOICES
from card.server.admission import is_guarded
from card.server.guided import StructuredOutputs
from card.server.ollama.schemas import OllamaOptions
from card.server.schemas import TOKEN_ID
from card.server.service import Service

_ERRORS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The body did not arrive.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; see Retry-After.",
    500: "The model failed, or the server did.",
    501: "The form of the answer needs a package that this server lacks.",
    503: "The server is shutting down, the engine is down, or the request took too long; see Retry-After.",
}
OF_BODIES = (400, 401, 404, 408, 413, 415, 500, 503)
OF_WRITING = (*OF_BODIES, 429, 501)
_OBJECT = {"type": "object"}
_TEXT = {"type": ["string", "null"]}
_DETAIL = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_DETAIL), "properties": _DETAIL}},
}
_OTHER_TOOL = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"const": "function"}}},
    "required": ["type"],
}
Handler = Callable[[Request], Awaitable[Response]]
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the API."""

    path: str
    handler: Handler
    errors: tuple[int, ...] = ()
    body: type[BaseModel] | None = None  # None: a GET, and a HEAD that the schema leaves out
    unavailable: str = _ERRORS[503]  # what status 503 means here
    stream: str = "text/event-stream"  # type of the answer if it is streamed
    error: Mapping[str, Any] | None = None  # schema of one; None: OpenAI's


def add_route(app: FastAPI, route: Route, *, has_keys: bool) -> None:
    """Add a path to the application, with its bodies, its answers, and whether it needs a key."""
    extra: dict[str, Any] = {}
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{model_name" in route.path:
        name = {"type": "string", "minLength": 1}
        extra["parameters"] = [{"name": "model_name", "in": "path", "required": True, "schema": name}]
    if has_keys and is_guarded(route.path):
        extra["security"] = [{"key": []}]
    app.add_api_route(
        route.path,
        route.handler,
        methods=["GET" if route.body is None else "POST"],
        response_model=None,
        response_class=Response,
        openapi_extra=extra,
        responses=_responses(route),
    )
    if route.body is None:
        app.add_api_route(route.path, route.handler, methods=["HEAD"], response_model=None, include_in_schema=False)


def _responses(route: Route) -> dict[int | str, dict[str, Any]]:
    kinds = {"text/plain": {"type": "string"}} if route.path == "/metrics" else {"application/json": _OBJECT}
    if route.errors == OF_WRITING:
        kinds[route.stream] = _OBJECT  # of each event
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "Done.", "content": _content(kinds)}}
    for status in route.errors:
        description = route.unavailable if status == 503 else _ERRORS[status]
        responses[status] = {
            "description": description,
            "content": _content({"application/json": dict(route.error or _ERROR)}),
        }
        if status in (429, 503):
            responses[status]["headers"] = _RETRY_AFTER
    return responses


def _content(kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in kinds.items()}


def describe(app: FastAPI, bodies: list[type[BaseModel]], service: Service, *, has_keys: bool) -> None:
    """Add the schemas of the bodies, and the way to send a key, to the application's `/openapi.json`."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in bodies], ref_template="#/components/schemas/{model}"
    )
    schemas = definitions["$defs"]
    for model in bodies:
        _limit(schemas[model.__name__]["properties"], service)
    for schema in schemas.values():
        _allow_null(schema, is_strict=service.settings.strict_fields)
    if not service.settings.strict_fields:
        _describe_ignored(schemas, [*bodies, StructuredOutputs, OllamaOptions])
    schemas[TOKEN_ID] = {"type": "integer", "minimum": 0, "maximum": service.vocab_size - 1}
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(schemas)
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_ignored(schemas: dict[str, Any], bodies: list[type[BaseModel]]) -> None:
    """Add fields whose harmless values alone are left aside, and tools that are left out."""
    for body in bodies:
        fields = schemas[body.__name__]["properties"] if body.__name__ in schemas else {}
        for name, values in getattr(body, "changing", {}).items():
            fields.setdefault(name, {"enum": [*values, None]})
    if (answers := schemas.get("ResponsesRequest")) is not None:
        tools = answers["properties"]["tools"]["anyOf"][0]
        tools["items"] = {"anyOf": [tools["items"], _OTHER_TOOL]}


def _limit(fields: dict[str, Any], service: Service) -> None:
    """Add this server's limits, which may be narrower than those of the fields."""
    room, settings = service.llm.max_model_len - 1, service.settings  # a prompt has at least one token
    if "tokens" in fields:
        fields["tokens"]["maxItems"] = service.most_ids
    num_choices = min(MAX_CHOICES, service.llm.host.settings.max_num_seqs + settings.max_num_queued_reqs)
    num_new_tokens = min(room, settings.max_request_tokens or room)
    names = {"enum": [*settings.served_model_names, ""]} if settings.strict_fields else {"type": "string"}
    fields["model"] = {**names, "default": ""}
    most = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"), num_new_tokens)
    for name, maximum in {"n": num_choices, **most}.items():
        field = fields.get(name, {})
        for kind in field.get("anyOf", [field]):
            if kind.get("type") == "integer":
                kind.pop("exclusiveMaximum", None)
                kind["maximum"] = maximum
        if (usual := field.get("default")) is not None:
            field["default"] = min(usual, maximum)


def _allow_null(body: dict[str, Any], *, is_strict: bool) -> None:
    """Let each optional field be null too, which counts as absent, and say whether others may be there."""
    body["additionalProperties"] = {"type": "null"} if is_strict else True
    for name, field in body["properties"].items():
        if name not in body.get("required", ()):
            outer = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            kinds = field["anyOf"] if "anyOf" in field else [dict(field)]
            is_nullable = {"type": "null"} in kinds
            field.clear()
            field.update(outer, anyOf=kinds if is_nullable else [*kinds, {"type": "null"}])
