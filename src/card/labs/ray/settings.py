"""Settings of an application on Ray Serve: in the `args` of a YAML file, or after `serve run card.ray:app`.

It takes settings of the pool, the engine and the server, by their usual names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card.config import DraftSettings, EngineSettings, parse_size
from card.config.fields import check, declared, require, setting
from card.config.splitting import split_settings
from card.errors import SettingsError
from card.models.demo import DEMO_NAMES
from card.server.config import ServerSettings, known_as

API_KEY_VARIABLE = "CARD_API_KEY"
_BY_RAY = frozenset({"host", "port", "max_connections", "head_timeout_s", "shutdown_timeout_s", "api_keys"})
_BY_POOL = frozenset({"draft_address", "draft_optional", "placement", "draft_cores"})
_RESOURCES = "a mapping such as {num_cpus: 2, num_gpus: 0.5}"
_DEMO_DRAFT = "demo-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Numbers of targets and drafters, the share of a node that each gets, and the place of the keys."""

    pool: str | None = setting(None, "Application whose drafters the targets use.", least=1, shown="this one")
    min_targets: int = setting(1, "Fewest targets.", least=1)
    max_targets: int = setting(1, "Most targets.", least=1)
    requests_per_target: float = setting(8.0, "Requests at once for which there is one more target.", above=0)
    min_drafters: int = setting(1, "Fewest drafters.", least=1)
    max_drafters: int = setting(1, "Most drafters.", least=1)
    targets_per_drafter: float = setting(4.0, "Busy targets for which there is one more drafter.", above=0)
    max_targets_per_drafter: int = setting(16, "Most targets that a drafter takes.", least=1)
    scale_up_s: float = setting(10.0, "Seconds of need before a replica more.", least=0, unit="seconds")
    scale_down_s: float = setting(120.0, "Seconds of idleness before a replica less.", least=0, unit="seconds")
    target_resources: Mapping[str, Any] | None = setting(
        None, "Ray's actor options of a target.", allowed=_RESOURCES, shown="num_cpus: 1"
    )
    drafter_resources: Mapping[str, Any] | None = setting(
        None, "Those of a drafter; fractions share a device.", allowed=_RESOURCES, shown="num_cpus: 1"
    )
    drafter_kv_cache_memory: str | None = setting(None, "Memory for a drafter's KV rows, such as 2GiB.")
    pool_keys: str | None = setting(None, "The server's folder of card keys, on each node with drafters.")

    def __post_init__(self) -> None:
        check(self)
        for few, many in (("min_targets", "max_targets"), ("min_drafters", "max_drafters")):
            least = getattr(self, few)
            require(getattr(self, many) >= least, many, f"at least {few} ({least})", getattr(self, many))
        if self.drafter_kv_cache_memory is not None:
            parse_size(self.drafter_kv_cache_memory, "drafter_kv_cache_memory")


@dataclass(frozen=True, slots=True)
class AppSettings:
    """The arguments of an application, sorted by purpose."""

    pool: PoolSettings
    engine: Mapping[str, Any]  # for `AsyncLLM`, target and method included
    server: Mapping[str, Any]  # for `ServerSettings`
    draft: str

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> AppSettings:
        """Sort the arguments; those of a command line are text. Raises: SettingsError."""
        pool_fields, server_fields, engine = declared(PoolSettings), declared(ServerSettings), dict(args)
        for name in engine:
            if name in _BY_RAY:
                raise SettingsError(f"{name} is not for card.ray: {_alternative_to(name)}")
            if name in _BY_POOL:
                raise SettingsError(f"{name} is not for card.ray: the pool says where a drafter is; leave it out")
        given = {name: _read(name, engine.pop(name)) for name in list(engine)}
        pool = {name: given.pop(name) for name in list(given) if name in pool_fields}
        served = {name: given.pop(name) for name in list(given) if name in server_fields}
        target = str(given.setdefault("target", EngineSettings().target))
        draft = given.pop("draft", None) or (_DEMO_DRAFT if target in DEMO_NAMES else None)
        if draft is None:
            raise SettingsError("a pool needs a draft model: give draft")
        served.setdefault("served_model_names", (known_as(target),))
        settings = cls(PoolSettings(**pool), given, served, str(draft))
        settings.check()
        return settings

    def check(self) -> None:
        """Refuse settings with which no replica could start. Raises: SettingsError."""
        engine, _ = split_settings({name: value for name, value in self.engine.items() if name != "method"})
        EngineSettings(**engine)
        ServerSettings(**self.server)

    def check_keys(self) -> None:
        """Refuse keys with which targets and drafters could not connect. Raises: SettingsError."""
        if (self.pool.pool_keys is None) != (self.engine.get("draft_keys") is None):
            raise SettingsError(
                "pool_keys are for the drafters and draft_keys for the targets: give both, or none on one machine"
            )

    @property
    def drafting(self) -> EngineSettings:
        """The engine settings that affect a drafter."""
        names = {
            "dtype",
            "draft_dtype",
            "device",
            "draft_device",
            "draft_threads",
            "max_model_len",
            "cache",
            "cache_dir",
        }
        return EngineSettings(**{name: value for name, value in self.engine.items() if name in names})

    def server_settings(self, host: str) -> ServerSettings:
        """Return the settings of a target's application behind Serve's proxies, which listen on ``host``.

        The key comes from the environment, which no file of Ray's shows. Raises: SettingsError for open access.
        """
        key = os.environ.get(API_KEY_VARIABLE)
        try:
            return ServerSettings(host=host, api_keys=(key,) if key else (), **self.server)
        except SettingsError as error:
            if key or "--api-key" not in str(error):
                raise
            raise SettingsError(
                f"everyone who reaches Serve's proxies could use this model: set {API_KEY_VARIABLE} where `ray start` "
                "runs, let Serve listen on 127.0.0.1, or give no_key: true if that is meant"
            ) from error


def _alternative_to(name: str) -> str:
    if name == "api_keys":
        return f"Ray shows arguments to many; set {API_KEY_VARIABLE} where `ray start` runs"
    return "Serve has the socket; see http_options and graceful_shutdown_timeout_s of Serve"


def _read(name: str, value: Any) -> Any:
    """Return the value of a command line's text; other values are returned as they are."""
    owners = (PoolSettings, ServerSettings, EngineSettings, DraftSettings)
    field = next((declared(owner)[name] for owner in owners if name in declared(owner)), None)
    if not isinstance(value, str) or (field is not None and field.kind is str and not field.is_list):
        return tuple(value) if isinstance(value, list) else value
    if field is not None and field.is_list:
        return tuple(part.strip() for part in value.split(","))
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise SettingsError(f"{name} cannot be read: {' '.join(str(error).split())}") from error


def check_folder(folder: str | None, name: str) -> Path | None:
    """Return the folder of keys, if one is given. Raises: SettingsError if it is not on this node."""
    if folder is not None and not Path(folder).is_dir():
        raise SettingsError(f"{name} must be a folder on every node that needs it, and it is not on this one")
    return None if folder is None else Path(folder)
