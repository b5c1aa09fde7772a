"""Whether the server lives, whether it should be sent requests, and how much it has to do."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from card import __version__
from card.errors import WorkerError
from card.server.answers import ErrorDetail, HealthAnswer, LoadAnswer, UnavailableAnswer, VersionAnswer, json_response
from card.server.errors import ApiError, as_api_error
from card.server.metrics import CONTENT_TYPE, Scrape
from card.server.service import Service


async def health(request: Request) -> Response:
    """Say that the server lives: 503 only if the engine has died, which a restart alone can mend."""
    return _answer(_death(request.app.state.service))


async def ready(request: Request) -> Response:
    """Say whether to send requests here: 503 while shutting down, or if the engine has work and does not get on."""
    service: Service = request.app.state.service
    return _answer(_death(service) or _reason_not_ready(service))


async def load(request: Request) -> Response:
    """Say how many requests are being answered, and how far the engine is with them."""
    service: Service = request.app.state.service
    stats = service.llm.stats()
    answer = LoadAnswer(
        server_load=service.gate.num_requests,
        running=stats.num_running,
        waiting=stats.num_waiting,
        max_num_seqs=service.llm.host.settings.max_num_seqs,
        max_num_queued_reqs=service.settings.max_num_queued_reqs,
    )
    return json_response(answer)


async def version(request: Request) -> Response:
    """Say which version of what is running."""
    service: Service = request.app.state.service
    engine = service.llm.host.settings
    answer = VersionAnswer(
        version=__version__,
        model=engine.target,
        draft_model=engine.draft,
        method=service.llm.method.name,
        exact=service.llm.method.is_exact,
        target_cost=service.llm.target_cost,
    )
    return json_response(answer)


async def metrics(request: Request) -> Response:
    """Give the figures to Prometheus."""
    service: Service = request.app.state.service
    scrape = Scrape(service)
    return Response(scrape.text(), media_type=None, headers={"Content-Type": CONTENT_TYPE})


def _answer(problem: ApiError | None) -> Response:
    if problem is None:
        return json_response(HealthAnswer())
    return json_response(UnavailableAnswer(error=ErrorDetail.of(problem)), problem.status, problem.headers())


def _death(service: Service) -> ApiError | None:
    try:
        service.llm.stats()
    except WorkerError as error:
        return as_api_error(error)
    return None


def _reason_not_ready(service: Service) -> ApiError | None:
    if not service.gate.is_open:
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)
    stalled_s, stats = service.llm.stalled_s, service.llm.stats()
    if stalled_s <= service.settings.stall_timeout_s:
        return None
    work = f"{stats.num_running} texts running and {stats.num_waiting} waiting"
    return ApiError(503, f"the engine is stuck: no progress for {stalled_s:.0f} s, {work}", code="stuck")
