"""Settings of the server itself, and the YAML file that may hold them and the engine's."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml  # type: ignore[import-untyped]

from card.errors import SettingsError
from card.server.hosts import check_host, check_origin
from card.server.tools.formats import ToolParserName

SpecMetrics = Literal["none", "summary"]
GenerationConfigSource = Literal["auto", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where the server listens, whom it lets in, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    served_model_names: tuple[str, ...] = ("card",)  # the first one is written into answers
    api_keys: tuple[str, ...] = ()  # any of them opens the door; none: it stands open
    no_key: bool = False  # it may stand open to other machines as well
    allowed_hosts: tuple[str, ...] = ()  # names to be asked under, besides loopback ones and `host`; "*": any
    cors_origins: tuple[str, ...] = ()  # whose web pages may ask, besides the server's own; "*": anyone's
    max_num_queued_reqs: int = 256  # most that wait besides max_num_seqs that run; a request counts n times
    max_request_bytes: int = 4 * 1024 * 1024
    max_request_tokens: int | None = None  # most new tokens that a request may ask for; None: as the context allows
    max_connections: int = 1024  # open at once, idle ones included
    head_timeout_s: float = 10.0  # for the line and the headers of a request to arrive
    body_timeout_s: float = 60.0  # for its body to arrive, and for a client to take what is sent to it
    grammar_timeout_s: float = 10.0  # for a request's grammar to be compiled
    request_timeout_s: float = 600.0  # longest time of a request, waiting included
    stall_timeout_s: float = 30.0  # without progress for so long the engine counts as stuck
    shutdown_timeout_s: float = 30.0  # what runs at SIGTERM may go on for so long
    generation_config: GenerationConfigSource = "auto"  # default sampling parameters: the model's own, or neutral ones
    spec_metrics: SpecMetrics = "none"  # every answer tells how speculation did, not only those asked to
    tool_parser: ToolParserName = "auto"  # how the model writes tool calls: as its chat template says, or as named
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        counts = {"port": 0, "max_num_queued_reqs": 0, "max_request_bytes": 1024, "max_connections": 1}
        for name, least in counts.items():
            _require(getattr(self, name) >= least, name, f"{least} or more", getattr(self, name))
        _require(self.port < 2**16, "port", "below 65536", self.port)
        _require(
            self.max_request_tokens is None or self.max_request_tokens >= 1,
            "max_request_tokens",
            "1 or more",
            self.max_request_tokens,
        )
        for name in ("head_timeout_s", "body_timeout_s", "grammar_timeout_s", "request_timeout_s", "stall_timeout_s"):
            _require(getattr(self, name) > 0, name, "above 0 seconds", getattr(self, name))
        _require(self.shutdown_timeout_s >= 0, "shutdown_timeout_s", "0 seconds or more", self.shutdown_timeout_s)
        choices = {
            "generation_config": GenerationConfigSource,
            "spec_metrics": SpecMetrics,
            "tool_parser": ToolParserName,
            "log_level": LogLevel,
        }
        for name, kind in choices.items():
            _require(getattr(self, name) in get_args(kind), name, f"one of {get_args(kind)}", getattr(self, name))
        _require(bool(self.served_model_names) and all(self.served_model_names), "served_model_names", "names", "''")
        if not all(key.strip() == key and key.isascii() and key for key in self.api_keys):
            raise SettingsError("an API key must be ASCII text without blanks around it; one of those given is not")
        for one in self.allowed_hosts:
            check_host(one)
        for one in self.cors_origins:
            check_origin(one)
        self._check_door()

    def _check_door(self) -> None:
        if self.no_key and self.api_keys:
            raise SettingsError("no_key and api_key are both given, of which one asks for a key; leave one out")
        if not (self.api_keys or self.no_key or is_loopback(self.host)):
            raise SettingsError(
                f"everyone who reaches {self.host} could use this server; set --api-key (or CARD_API_KEY), listen on "
                "127.0.0.1, or say --no-key if that is meant"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_config_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Return the settings in a YAML file, under the flags' names with underscores.

    Lists become tuples of their items; the file says `max-num-seqs: 8` or `max_num_seqs: 8`.
    Raises: SettingsError for a file that cannot be read, is no mapping, or has a name that is not among ``known``.
    """
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the config file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"the config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"the config file {path} must map names of flags to values, got a {type(content).__name__}")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            flags = ", ".join(sorted(one.replace("_", "-") for one in known))
            raise SettingsError(f"the config file {path} has an unknown name {key!r}; known: {flags}")
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value)):
            raise SettingsError(f"{key} in the config file {path} must be one value or a list of values")
        settings[name] = tuple(value) if isinstance(value, list) else value
    return settings


def _require(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise SettingsError(f"{name} must be {allowed}, got {value!r}")
