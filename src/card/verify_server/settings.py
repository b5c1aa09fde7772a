"""What `card verify-server` is told: where the servers are, how they are asked, and what."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from card.errors import PromptError, SettingsError

Api = Literal["auto", "chat", "completions"]
_LEAST_PROMPTS = 2  # what is asked at once must differ, or a server may answer it from one row


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server and how it lets us in."""

    url: str  # as of `base_url`
    model: str | None = None  # None: the first one that it lists
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise SettingsError("an API key must be printable ASCII without blanks; give one key, as the server has it")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """How the servers are asked."""

    api: Api = "auto"
    plain_fields: dict[str, Any] | None = None  # of a request, to switch speculation off; None: as the server has it
    max_tokens: int = 64
    concurrency: int = 4  # questions in flight at once in the checks of batches
    temperature: float = 1.0  # of the seeded checks
    seed: int = 1  # of the first seeded question; the others count on from it
    timeout_s: float = 120.0  # for a whole answer
    logprob_tolerance: float = 0.1  # log-probabilities of one token that are no further apart count as equal

    def __post_init__(self) -> None:
        if self.api not in get_args(Api):
            raise SettingsError(f"api must be one of {', '.join(get_args(Api))}, got {self.api!r}")
        if self.max_tokens < 1:
            raise SettingsError(f"max_tokens must be 1 or more, got {self.max_tokens}")
        if self.concurrency < 2:
            raise SettingsError(f"concurrency must be 2 or more, or nothing is asked at once; got {self.concurrency}")
        if not (math.isfinite(self.temperature) and self.temperature > 0.0):
            raise SettingsError(f"temperature must be above 0, as it is for seeded questions; got {self.temperature}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0.0):
            raise SettingsError(f"timeout_s must be above 0 seconds, got {self.timeout_s}")
        if not self.logprob_tolerance >= 0.0:
            raise SettingsError(f"logprob_tolerance must be 0 or more, got {self.logprob_tolerance}")


def base_url(text: str) -> str:
    """Return the address that paths such as /chat/completions are put behind; /v1 is added to a bare host.

    Raises: SettingsError for what is no address of a server.
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


def read_prompts(path: Path, limit: int) -> tuple[str, ...]:
    """Return the first prompts of a file: JSON lines with "question", or one prompt on each line.

    Raises: PromptError if there are too few, or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise PromptError(f"{path} is not valid UTF-8; convert it first") from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}; name another file") from None
    found = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    is_json = path.suffix == ".jsonl"
    prompts = tuple(
        _question(path, number, line) if is_json else line.strip() for number, line in islice(found, max(limit, 0))
    )
    if len(set(prompts)) < _LEAST_PROMPTS:
        raise PromptError(
            f"{path} with a limit of {limit} gives {len(set(prompts))} prompts; {_LEAST_PROMPTS} different ones or "
            "more are needed to ask several at once"
        )
    return prompts


def _question(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path}, line {number}: not JSON: {error}") from None
    question = record.get("question") if isinstance(record, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise PromptError(f'{path}, line {number}: must be an object with a text in "question"')
    return question
