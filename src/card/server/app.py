"""The application: every path, and the processing around each request."""

from __future__ import annotations

import functools
import logging
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from card.server.admission import AllowedHosts, AllowedOrigins, KeyRing
from card.server.answers import error_response
from card.server.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from card.server.arrivals import Arrival
from card.server.chat import chat_completions
from card.server.completions import completions
from card.server.config import ServerSettings
from card.server.errors import ApiError, as_api_error
from card.server.infill import infill
from card.server.infill_schemas import InfillRequest
from card.server.info import (
    detokenize,
    health,
    list_models,
    load,
    metrics,
    ready,
    show_model,
    tokenize,
    version,
)
from card.server.logs import frames_of, log_event
from card.server.not_done import refuse_the_rest
from card.server.ollama.routes import ROUTES as OLLAMA_ROUTES
from card.server.openapi import OF_BODIES, OF_WRITING, Handler, Route, add_route, describe
from card.server.page import Playground
from card.server.response_schemas import ResponsesRequest
from card.server.responses import input_tokens, responses
from card.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from card.server.service import Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_QUIET_PATHS = ("/health", "/metrics", "/load", "/playground/")  # requested every few seconds, or many at once
_ROUTES = (
    Route("/v1/chat/completions", chat_completions, OF_WRITING, ChatRequest),
    Route("/v1/completions", completions, OF_WRITING, CompletionRequest),
    Route("/v1/responses", responses, OF_WRITING, ResponsesRequest),
    Route("/v1/responses/input_tokens", input_tokens, OF_BODIES, ResponsesRequest),
    Route("/infill", infill, OF_WRITING, InfillRequest),
    Route("/tokenize", tokenize, OF_BODIES, TokenizeRequest),
    Route("/detokenize", detokenize, OF_BODIES, DetokenizeRequest),
    Route("/v1/models", list_models, (401,)),
    Route("/v1/models/{model_name:path}", show_model, (401, 404)),
    Route("/health", health, (503,), unavailable="The engine has died: restart the process."),
    Route(
        "/health/ready",
        ready,
        (503,),
        unavailable="Shutting down or stuck, or the engine has died: use another server.",
    ),
    Route("/metrics", metrics),
    Route("/version", version),
    Route("/load", load, (503,)),
    *ANTHROPIC_ROUTES,
    *OLLAMA_ROUTES,
)


def make_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Return the application around a model. All endpoints share its `state.service`."""
    app = FastAPI(title="CARD", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service = Service(llm, settings)
    has_keys = bool(settings.api_keys)
    for route in _ROUTES:
        timed = route if route.body is None else replace(route, handler=_in_time(route.handler))
        add_route(app, timed, has_keys=has_keys)
    refuse_the_rest(app)
    playground = Playground()
    app.add_api_route("/", playground.index, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    app.mount("/playground", playground)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(CardError, _on_card_error)
    origins = AllowedOrigins(settings.cors_origins)
    app.add_middleware(Guard, keys=KeyRing(settings.api_keys), service=service)  # the last one added is the outermost
    if origins.named:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins.named,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "x-card-ignored", "x-card-model", "x-request-id", "x-should-retry"),
            allow_private_network=True,
        )
    hosts = AllowedHosts(settings.host, settings.allowed_hosts)
    app.add_middleware(Envelope, service=service, hosts=hosts, origins=None if has_keys else origins)
    describe(app, [route.body for route in _ROUTES if route.body is not None], service, has_keys=has_keys)
    return app


class Envelope:
    """Gives every request an id and a log line, and refuses host names and origins that are not allowed."""

    def __init__(self, app: ASGIApp, *, service: Service, hosts: AllowedHosts, origins: AllowedOrigins | None) -> None:
        """Wrap an application.

        Args:
            origins: None where requests need a key: a page has no key unless the user gave it one.
        """
        self._app, self._service, self._hosts, self._origins = app, service, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                message["headers"] = [*message.get("headers", ()), *_own_headers(state)]
            await send(message)

        try:
            self._hosts.check([value for name, value in scope["headers"] if name == b"host"])
            if self._origins is not None:
                self._origins.check(headers.get(b"origin"), headers.get(b"host", b""))
            await self._app(scope, receive, send_named)
        except ApiError as error:
            await error_response(error)(scope, receive, send_named)
        finally:
            self._log(scope, request_id, status, time.perf_counter() - started_at)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if status >= 400:
            self._service.ledger.errors[status] += 1
        level = logging.DEBUG if scope["path"].startswith(_QUIET_PATHS) else logging.INFO
        fields: dict[str, object] = {}
        if (generation := scope["state"].get("generation")) is not None:
            records = [choice.record for choice in generation.choices]
            fields = {
                "prompt_tokens": sum(record.stats.num_prompt_tokens for record in records),
                "new_tokens": sum(record.stats.num_new_tokens for record in records),
                "finish_reasons": [record.finish_reason for record in records],
            }
        fields |= {"method": scope["method"], "path": scope["path"][:200], "client": (scope.get("client") or [""])[0]}
        log_event(logger, level, "request", request_id=request_id, status=status, seconds=round(seconds, 4), **fields)


def _own_headers(state: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    """Yield what each answer says of its request: its id, and what of it was left aside."""
    yield b"x-request-id", state["request_id"].encode()
    for header, name in ((b"x-card-ignored", "ignored"), (b"x-card-model", "model")):
        if state.get(name):
            yield header, state[name].encode()


class Guard:
    """Checks the API key, counts what has a body from its arrival on, and answers with an error if our code fails."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, service: Service) -> None:
        self._app, self._keys, self._service = app, keys, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._keys.check(scope["path"], dict(scope["headers"]))
            await self._counted(scope, receive, send_noted)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except Exception as error:  # a bug of ours: the client gets an answer, the log gets the traceback
            at, request_id = frames_of(error.__traceback__), scope["state"]["request_id"]
            log_event(logger, logging.ERROR, "failed", request_id=request_id, exception=type(error).__name__, at=at)
            if has_begun:
                raise
            await error_response(as_api_error(error))(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        arrivals = self._service.arrivals
        scope["state"]["arrival"] = arrival = arrivals.begin(self._service.client_of(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            arrivals.end(arrival)


def _in_time(handler: Handler) -> Handler:
    """Return what ends the preparing of an answer when the request's time is over; a stream has its own end."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        arrival: Arrival = request.state.arrival
        async with arrival.deadline:
            return await handler(request)

    return answer


async def _on_card_error(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error, getattr(request.state, "spelling", {})))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    code = "no_such_path" if error.status_code == 404 else None
    return error_response(ApiError(error.status_code, message, code=code), **(error.headers or {}))  # such as Allow
