"""The application: every path, and what happens around each request."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from card import __version__
from card.api.async_llm import AsyncLLM
from card.errors import CardError
from card.server.answers import json_response
from card.server.auth import KeyRing
from card.server.catalog import detokenize, embeddings, list_models, show_model, tokenize
from card.server.chat import chat_completions
from card.server.completions import completions
from card.server.config import ServerSettings
from card.server.described import BODIES, answers, describe, operation
from card.server.errors import ApiError, as_api_error
from card.server.health import health, load, metrics, ready, version
from card.server.hosts import AllowedHosts, AllowedOrigins
from card.server.logs import tell, where
from card.server.page import Playground
from card.server.responses import responses
from card.server.service import Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_QUIET_PATHS = ("/health", "/metrics", "/load", "/playground/")  # asked every few seconds, or many at once
_HANDLERS = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/models": list_models,
    "/v1/models/{model_name:path}": show_model,
    "/health": health,
    "/health/ready": ready,
    "/metrics": metrics,
    "/version": version,
    "/load": load,
}


def make_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Return the application around a model. Its `state.service` is what all endpoints share."""
    app = FastAPI(title="CARD", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service = Service(llm, settings)
    for path, handler in _HANDLERS.items():
        method = "POST" if path in BODIES else "GET"
        app.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            response_class=Response,
            openapi_extra=operation(path, has_keys=bool(settings.api_keys)),
            responses=answers(path),
        )
    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"], response_model=None, include_in_schema=False)
    playground = Playground()
    for path, handler in (("/", playground.index), ("/playground/{name:path}", playground.asset)):
        app.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(CardError, _on_card_error)
    origins = AllowedOrigins(settings.cors_origins)
    app.add_middleware(Guard, keys=KeyRing(settings.api_keys))  # the one added last is the outermost
    if origins.named:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins.named,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "x-request-id", "x-should-retry"),
            allow_private_network=True,
        )
    hosts = AllowedHosts(settings.host, settings.allowed_hosts)
    app.add_middleware(Envelope, service=service, hosts=hosts, origins=None if settings.api_keys else origins)
    describe(app, service.limits, has_keys=bool(settings.api_keys))
    return app


class Envelope:
    """Around every request: an id, a line in the log, and nothing for those who ask under a name not allowed."""

    def __init__(self, app: ASGIApp, *, service: Service, hosts: AllowedHosts, origins: AllowedOrigins | None) -> None:
        """Take what is inside.

        Args:
            origins: None where a key is asked for, which no page has unless it was told.
        """
        self._app, self._service, self._hosts, self._origins = app, service, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        started_at, status = time.perf_counter(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._hosts.check([value for name, value in scope["headers"] if name == b"host"])
            if self._origins is not None:
                self._origins.check(headers.get(b"origin"), headers.get(b"host", b""))
            await self._app(scope, receive, send_named)
        except ApiError as error:
            await _response(error)(scope, receive, send_named)
        finally:
            self._log(scope, request_id, status, time.perf_counter() - started_at)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if status >= 400:
            errors = self._service.ledger.errors
            errors[status] = errors.get(status, 0) + 1
        level = logging.DEBUG if scope["path"].startswith(_QUIET_PATHS) else logging.INFO
        generation = scope["state"].get("generation")
        fields: dict[str, object] = {}
        if generation is not None:
            records = [choice.record for choice in generation.choices]
            fields = {
                "prompt_tokens": sum(record.stats.num_prompt_tokens for record in records),
                "new_tokens": sum(record.stats.num_new_tokens for record in records),
                "finish_reasons": [record.finish_reason for record in records],
            }
        client = scope.get("client")
        tell(
            logger,
            level,
            "request",
            request_id=request_id,
            method=scope["method"],
            path=scope["path"][:200],
            status=status,
            seconds=round(seconds, 4),
            client=client[0] if client else "",
            **fields,
        )


class Guard:
    """Asks for the key, and sees to it that there is an answer even where our code fails."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._keys.check(scope["path"], dict(scope["headers"]).get(b"authorization"))
            await self._app(scope, receive, send_noted)
        except ApiError as error:
            await _response(error)(scope, receive, send)
        except Exception as error:  # whatever it is, it is ours: the client gets an answer and the log the place
            at, request_id = where(error.__traceback__), scope["state"]["request_id"]
            tell(logger, logging.ERROR, "failed", request_id=request_id, exception=type(error).__name__, at=at)
            if has_begun:
                raise
            await _response(as_api_error(error))(scope, receive, send)


def _response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


async def _on_card_error(request: Request, error: Exception) -> Response:
    return _response(as_api_error(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    answer = ApiError(error.status_code, message, code="no_such_path" if error.status_code == 404 else None)
    return json_response(answer.body(), answer.status, {**answer.headers(), **(error.headers or {})})  # such as Allow
