"""Who may ask: API keys, compared in constant time and kept as digests only."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from card.server.errors import ApiError

_GUARDED = ("/v1/", "/tokenize", "/detokenize")


class KeyRing:
    """The keys that open the door; an empty ring leaves it open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, path: str, authorization: bytes | None) -> None:
        """Let a request pass. Raises: ApiError 401 if its path is guarded and it brings no key that fits.

        Every key is compared, digests of equal length, so that the time tells nothing about how much of one was right.
        """
        if not self._digests or not is_guarded(path):
            return
        scheme, _, given = (authorization or b"").partition(b" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "no API key was given" if authorization is None else "the API key is not one of this server's"
            raise ApiError(401, f"{what}; send the header Authorization: Bearer KEY", code="invalid_api_key")


def is_guarded(path: str) -> bool:
    """Return whether the path needs a key: all that makes the model or its tokenizer work."""
    return path.startswith(_GUARDED)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
