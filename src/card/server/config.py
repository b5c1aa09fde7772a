"""Settings of the server itself, and the YAML file that may hold them and the engine's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from card.config.fields import check, make_plain, require, setting
from card.errors import SettingsError, known_instead, named, plain_words
from card.machine.folders import expanded
from card.server.admission import as_address, check_host, check_origin
from card.text.lines import read_text

SpecMetrics = Literal["none", "summary"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Address of the server, its access rules and its limits."""

    SECTION: ClassVar[str] = "Server"

    host: str = setting("127.0.0.1", "Address to listen on.", shown="127.0.0.1, this machine only", is_common=True)
    port: int = setting(8000, "Port; 0 takes a free one.", least=0, most=2**16 - 1, is_common=True)
    served_model_names: tuple[str, ...] = setting(  # the first one is written into answers
        ("card",),
        "Name that clients use.",
        least=1,
        num_items=(1, 1024),
        allowed="a list of names that are not empty",
        shown="MODEL's own name",
        is_common=True,
    )
    api_keys: tuple[str, ...] = setting(  # none: every client is accepted
        (),
        "Key that clients must send; better in CARD_API_KEY.",
        allowed="a list of keys",
        is_common=True,
    )
    no_key: bool = setting(False, "Require no key.", is_common=True)
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Name of this server, * for any.",
        allowed="a list of names",
        shown="localhost, loopback addresses, the address of --host",
        is_common=True,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origin whose web pages may use it, * for any.",
        allowed="a list of origins",
        is_common=True,
    )
    max_num_queued_reqs: int = setting(  # a request counts once for each text that it asks for
        256, "Most waiting requests; more get status 429.", least=0
    )
    max_request_bytes: int = setting(4 * 1024 * 1024, "Largest body of a request.", least=1024)
    max_request_tokens: int | None = setting(None, "Most new tokens of a request.", least=1, shown="the context")
    max_connections: int = setting(1024, "Most connections, idle too.", least=1)
    head_timeout_s: float = setting(10.0, "Seconds for headers to arrive.", above=0, unit="seconds")
    body_timeout_s: float = setting(60.0, "Seconds to send a body or read an answer.", above=0, unit="seconds")
    first_token_timeout_s: float = setting(1800.0, "Most seconds before an answer.", above=0, unit="seconds")
    request_timeout_s: float = setting(600.0, "Most seconds of an answer.", above=0, unit="seconds")
    ping_interval_s: float = setting(5.0, "Seconds of silence before a comment; 0: none.", least=0, unit="seconds")
    stall_timeout_s: float = setting(30.0, "Seconds without progress until not ready.", above=0, unit="seconds")
    shutdown_timeout_s: float = setting(30.0, "Seconds for requests at shutdown.", least=0, unit="seconds")
    strict_fields: bool = setting(False, "Refuse unknown fields and model names.")
    spec_metrics: SpecMetrics = setting("none", "Report speculation in answers.")
    log_level: LogLevel = setting("info", "How much to log.")

    def __post_init__(self) -> None:
        make_plain(self)
        check(self)
        require(
            all(map(str.isprintable, self.served_model_names)),
            "served_model_names",
            "names of printable characters",
            self.served_model_names,
        )
        if not all(key.strip() == key and key.isascii() and key for key in self.api_keys):
            raise SettingsError("an API key must be ASCII text without blanks around it; one of those given is not")
        for one in self.allowed_hosts:
            check_host(one)
        for one in self.cors_origins:
            check_origin(one)
        self._check_door()

    def _check_door(self) -> None:
        if self.no_key and self.api_keys:
            raise SettingsError(
                f"{named('no_key')} and {named('api_key')} are both given and contradict each other; leave one out"
            )
        if not (self.api_keys or self.no_key or is_loopback(self.host)):
            raise SettingsError(
                f"any client that reaches {self.host} could use this server; set --api-key (or CARD_API_KEY), "
                "listen on 127.0.0.1, or set --no-key if that is intended"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on ``host``."""
    address = as_address(host)
    return host == "localhost" if address is None else address.is_loopback


def known_as(source: str) -> str:
    """Return the public name of a model; the path of a file or folder is left out."""
    path = expanded(source)
    return plain_words(path.absolute().name if path.is_absolute() or path.exists() else source)


def read_config_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Return the settings in a YAML file, under the flags' names with underscores.

    Values are texts, as the command line's are: a number for a switch, say, is then refused alike. Lists become tuples
    of their items, and null is left out; the file says `max-num-seqs: 8` or `max_num_seqs: 8`.
    Raises: SettingsError for a file that cannot be read, is not a mapping, or has a name that is not among ``known``.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(read_text(path, SettingsError))
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
            flags = {one.replace("_", "-") for one in known}
            raise SettingsError(f"the config file {path} has an unknown name {key!r}; {known_instead(key, flags)}")
        several = value if isinstance(value, list) else [value]
        if any(isinstance(one, dict | list) or (one is None and several is value) for one in several):
            raise SettingsError(f"{key} in the config file {path} must be one value or a list of values")
        if value is not None:
            settings[name] = tuple(map(str, value)) if isinstance(value, list) else str(value)
    return settings
