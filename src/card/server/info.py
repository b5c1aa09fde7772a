"""Endpoints without generated text: models and their tokens, health, figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card import __version__
from card.errors import WorkerError
from card.server.answers import error_content, json_response
from card.server.bodies import read_body, run_apart
from card.server.config import known_as
from card.server.errors import ApiError, as_api_error, bad_request
from card.server.params import check_id
from card.server.schemas import DetokenizeRequest, TokenizeRequest
from card.server.scrape import CONTENT_TYPE, Scrape
from card.server.service import LONG_CHARS, Service
from card.text.tokens import decode


async def list_models(request: Request) -> Response:
    """List the names under which the model is served."""
    service: Service = request.app.state.service
    models = [_model(service, name) for name in service.settings.served_model_names]
    return json_response({"object": "list", "data": models})


async def show_model(request: Request) -> Response:
    """Describe one model."""
    service: Service = request.app.state.service
    return json_response(_model(service, service.check_model(request.path_params["model_name"], must_be_known=True)))


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt, or of a conversation in the model's chat template."""
    service: Service = request.app.state.service
    fields = await read_body(request, TokenizeRequest)
    service.check_model(fields.model)
    is_long = len(fields.prompt or "") >= LONG_CHARS
    if is_long:
        service.check_countable(fields.prompt or "")
    if fields.messages is not None:
        conversation = await run_apart(request, service.tools.conversation, fields.messages)
        token_ids = list(await service.encode(conversation, must_fit=False))
    elif fields.add_special_tokens and fields.prompt:
        token_ids = list(await service.encode(fields.prompt, must_fit=False))
    else:
        encode = service.tokenizer.encode
        token_ids = await service.run_in_thread(
            is_long, encode, fields.prompt or "", add_special_tokens=fields.add_special_tokens
        )
    names: Any = None
    if fields.return_token_strs:
        names = await service.run_in_thread(is_long, list, map(service.tokenizer.convert_ids_to_tokens, token_ids))
    max_model_len = service.llm.max_model_len
    answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": names}
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    service: Service = request.app.state.service
    fields = await read_body(request, DetokenizeRequest)
    service.check_model(fields.model)
    if len(fields.tokens) > (most := service.most_ids):
        raise bad_request(f"tokens: at most {most} ids may be sent, got {len(fields.tokens)}", "tokens")
    text = await service.run_in_thread(len(fields.tokens) >= LONG_CHARS, _text_of, service, fields.tokens)
    return json_response({"prompt": text})


def _text_of(service: Service, token_ids: Sequence[int]) -> str:
    for token_id in token_ids:
        check_id(token_id, "tokens", service.vocab_size)
    return decode(service.tokenizer, token_ids)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "card",
        "root": known_as(service.llm.host.settings.target),
        "parent": None,
        "max_model_len": service.llm.max_model_len,
    }


# ---- health and figures ----------------------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """Report that the server is alive: 503 only if the engine has died, when only a restart helps."""
    return _answer(_death(request.app.state.service))


async def ready(request: Request) -> Response:
    """Report whether to send requests here: 503 while shutting down, or if the engine makes no progress."""
    service: Service = request.app.state.service
    return _answer(_death(service) or _reason_not_ready(service))


async def load(request: Request) -> Response:
    """Report how many requests are being answered, and the engine's progress."""
    service: Service = request.app.state.service
    stats = service.llm.stats()
    answer = {
        "server_load": service.gate.num_requests,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "max_num_seqs": service.llm.host.settings.max_num_seqs,
        "max_num_queued_reqs": service.settings.max_num_queued_reqs,
    }
    return json_response(answer)


async def version(request: Request) -> Response:
    """Report the versions of what is running."""
    service: Service = request.app.state.service
    engine = service.llm.host.settings
    answer = {
        "version": __version__,
        "served_model_name": service.settings.served_model_names[0],
        "model": known_as(engine.target),
        "draft_model": known_as(engine.draft) if engine.draft is not None else None,
        "method": service.llm.method.name,
        "exact": service.llm.is_exact,
        "target_cost": service.llm.target_cost,
    }
    return json_response(answer)


async def metrics(request: Request) -> Response:
    """Return the figures for Prometheus."""
    service: Service = request.app.state.service
    scrape = Scrape(service)
    return Response(scrape.text(), media_type=None, headers={"Content-Type": CONTENT_TYPE})


def _answer(problem: ApiError | None) -> Response:
    if problem is None:
        return json_response({"status": "ok"})
    return json_response(error_content(problem) | {"status": "unavailable"}, problem.status, problem.headers())


def _death(service: Service) -> ApiError | None:
    try:
        service.llm.stats()
    except WorkerError as error:
        return as_api_error(error)
    return None


def _reason_not_ready(service: Service) -> ApiError | None:
    if not service.arrivals.is_open:
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)
    stalled_s, stats = service.llm.stalled_s, service.llm.stats()
    if stalled_s <= service.settings.stall_timeout_s:
        return None
    work = f"{stats.num_running} texts running and {stats.num_waiting} waiting"
    return ApiError(503, f"the engine is stuck: no progress for {stalled_s:.0f} s, {work}", code="stuck")
