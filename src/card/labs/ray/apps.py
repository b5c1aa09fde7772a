"""The applications: targets with a pool of their own, targets of another application's pool, a pool alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from card.config import EngineSettings
from card.labs.ray.desk import LeaseDesk
from card.labs.ray.drafter import DrafterReplica
from card.labs.ray.settings import AppSettings, PoolSettings
from card.labs.ray.target import DESK, TargetReplica
from card.server.config import ServerSettings

TARGET, POOL = "Target", "DraftPool"
_SERVED_BESIDE_LIMIT = 16  # more requests reach a full target, which answers when to try again
_LEAST_RESOURCES = {"num_cpus": 1}
_HEALTH = {"health_check_period_s": 5.0, "health_check_timeout_s": 30.0}


def app(args: dict[str, Any]) -> Any:
    """Return an application of targets, with drafters of its own unless `pool` names another application's.

    Args:
        args: settings of the pool, the engine and the server; see docs/ray.md.
    Raises: SettingsError.
    """
    settings = AppSettings.of(args)
    target = _target(settings)
    if settings.pool.pool is not None:
        return target.bind(args, None)
    settings.check_keys()
    desk = _desk()
    return target.bind(args, desk, _pool(settings).bind(args, desk))


def pool(args: dict[str, Any]) -> Any:
    """Return an application of drafters alone, for targets of other applications; no route. Raises: SettingsError."""
    settings = AppSettings.of(args)
    return _pool(settings).bind(args, _desk())


def _desk() -> Any:
    options = {"num_replicas": 1, "max_ongoing_requests": 1000, "ray_actor_options": {"num_cpus": 0}}
    return serve.deployment(LeaseDesk, name=DESK, **options, **_HEALTH).bind()


def _target(settings: AppSettings) -> Any:
    pool, wanted = settings.pool, EngineSettings().max_num_seqs
    served = ServerSettings(**settings.server)
    at_once = int(settings.engine.get("max_num_seqs", wanted)) + _SERVED_BESIDE_LIMIT
    replicas = _replicas(pool, pool.min_targets, pool.max_targets, target_ongoing_requests=pool.requests_per_target)
    return serve.deployment(
        serve.ingress()(TargetReplica),
        name=TARGET,
        max_ongoing_requests=at_once,
        ray_actor_options=_options(pool.target_resources),
        graceful_shutdown_timeout_s=served.first_token_timeout_s + served.request_timeout_s,
        **replicas,
        **_HEALTH,
    )


def _pool(settings: AppSettings) -> Any:
    pool = settings.pool
    policy = AutoscalingPolicy(
        policy_function="card.labs.ray.allocation:ByTargets",
        policy_kwargs={"targets_per_drafter": pool.targets_per_drafter},
    )
    return serve.deployment(
        DrafterReplica,
        name=POOL,
        ray_actor_options=_options(pool.drafter_resources),
        graceful_shutdown_timeout_s=10.0,
        **_replicas(pool, pool.min_drafters, pool.max_drafters, policy=policy),
        **_HEALTH,
    )


def _replicas(pool: PoolSettings, least: int, most: int, **how: Any) -> dict[str, Any]:
    """Return Serve's options for the number of replicas: fixed, or following the load."""
    if least == most:
        return {"num_replicas": least}
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        upscale_delay_s=pool.scale_up_s,
        downscale_delay_s=pool.scale_down_s,
        look_back_period_s=max(pool.scale_up_s, 10.1),
        **how,
    )
    return {"autoscaling_config": scaling}


def _options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(_LEAST_RESOURCES if given is None else given)
