"""A target: one replica with an engine and the application of `card serve`; its drafter is leased from a pool."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from card.api.async_llm import AsyncLLM
from card.errors import WorkerError
from card.labs.ray.desk import RayLeases
from card.labs.ray.settings import AppSettings, check_folder
from card.server.app import make_app
from card.server.logs import set_up
from card.server.service import Service

logger = logging.getLogger(__name__)
DESK = "LeaseDesk"
_LOOPBACK = "127.0.0.1"


class TargetReplica:
    """Answers OpenAI's API, with or without a drafter from the pool."""

    def __init__(self, args: dict[str, Any], desk: DeploymentHandle[Any] | None, pool: Any = None) -> None:
        """Load the model.

        Args:
            desk: of the pool; None: that of the application that the settings name.
            pool: makes Ray run the drafters with this application; never called.
        Raises: SettingsError, ModelError.
        """
        del pool
        settings = AppSettings.of(args)
        check_folder(settings.engine.get("draft_keys"), "draft_keys")
        server = settings.server_settings(_listened_on())
        set_up(server.log_level)
        if desk is None:
            desk = serve.get_deployment_handle(DESK, settings.pool.pool)
        engine = {"threads": threads_of(settings), **settings.engine}
        self._leases = RayLeases(desk, ray.util.get_node_ip_address())
        self._llm = AsyncLLM(**engine, leases=self._leases)
        app = make_app(self._llm, server)
        self._service: Service = app.state.service
        self._app = _Quiet(app)
        logger.info("a target is ready")

    def __serve_build_asgi_app__(self) -> ASGIApp:  # the name that Serve asks for
        return self._app

    def check_health(self) -> None:
        """Raise WorkerError if the engine has failed or hangs: Ray then replaces this replica."""
        self._llm.stats()
        if self._llm.stalled_s > self._service.settings.stall_timeout_s:
            raise WorkerError(f"the engine is stuck: no progress for {self._llm.stalled_s:.0f} s")

    async def __del__(self) -> None:
        """End engine and lease. Serve has waited for the requests, or has run out of time."""
        if not hasattr(self, "_service"):
            return
        self._service.close()
        await self._llm.shutdown()
        await asyncio.to_thread(self._leases.close)


class _Quiet:
    """Keeps error messages out of Ray's logs; our own log says where the error was."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # of any type: Ray would log its message
            raise WorkerError(f"an answer was broken off by {type(error).__name__}") from None


def threads_of(settings: AppSettings) -> int:
    """Return a target's default number of threads: its share of the node's cores."""
    resources = settings.pool.target_resources or {}
    return max(1, int(resources.get("num_cpus", 1)))


def _listened_on() -> str:
    """Return the address that Serve's proxies listen on, which decides whether a key is needed."""
    client = _get_global_client()
    return str(client.http_config.host or _LOOPBACK) if client is not None else _LOOPBACK
