"""Settings of `card verify-server`: addresses of the servers, and the questions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from card.config.fields import check, setting
from card.errors import SettingsError

Api = Literal["auto", "chat", "completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a server, with its key."""

    url: str  # as of `base_url`
    model: str | None = None  # None: the first one that it lists
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise SettingsError("an API key must be printable ASCII without blanks; give one key, as the server has it")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Settings of the questions to the servers."""

    api: Api = setting("auto", "Ask by chat, completions, or what works (auto).")
    plain_fields: dict[str, Any] | None = None  # of a request, to switch speculation off; None: the server's own switch
    max_tokens: int = setting(64, "Most new tokens of an answer.", least=1, section="Text", is_common=True)
    concurrency: int = setting(4, "Questions at once.", least=2)
    temperature: float = setting(
        1.0, "Of the seeded questions.", above=0, below=math.inf, section="Text", is_common=True
    )
    seed: int = setting(
        1, "Seed of the first seeded question.", section="Text", is_common=True
    )  # the others count on from it
    timeout_s: float = setting(120.0, "Seconds for one answer.", above=0, below=math.inf, unit="seconds")
    logprob_tolerance: float = setting(
        0.1, "Log-probabilities this close count as equal.", least=0, section="Comparison"
    )

    def __post_init__(self) -> None:
        check(self)


def base_url(text: str) -> str:
    """Return the address to which paths such as /chat/completions are appended; /v1 is added to a bare host.

    Raises: SettingsError if the text is no address of a server.
    """
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"{text!r} is no URL: {error}; give one such as http://127.0.0.1:8000") from None
    if parts.username is not None or parts.password is not None:
        raise SettingsError("the URL holds a name or a password; give keys by --api-key or their variables instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise SettingsError(f"{text!r} is no URL of a server; give one such as http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise SettingsError(f"{text!r} has a query or a fragment; give the part before it, such as http://host:8000/v1")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def parse_plain_fields(text: str) -> dict[str, Any]:
    """Return the fields of a request in a JSON object. Raises: SettingsError."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f'--plain-fields must be a JSON object such as \'{{"speculation": "off"}}\': {error}'
        ) from None
    if not isinstance(fields, dict) or not fields:
        raise SettingsError(f"--plain-fields must be a JSON object with a field or more, got {text[:80]!r}")
    return fields
