"""Admission of requests by API key, by host name and by the origin of a web page.

A foreign web page must reach nothing. It can point its own name at this machine (DNS rebinding). The browser then
treats the server's answers as the page's own, but the `Host` header still has that name. A page may also send simple
requests to any address without being able to read the answers. The `Origin` header names the page they come from.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping

from card.errors import SettingsError
from card.server.errors import ApiError

_GUARDED = ("/v1/", "/api/", "/infill", "/tokenize", "/detokenize")
_OTHER_HEADER = b"x-api-key"  # Anthropic's clients send the key there


class KeyRing:
    """The API keys that are accepted; with an empty ring every request passes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Admit a request. Raises: ApiError 401 if its path is guarded and its key is missing or wrong.

        Digests of equal length are compared with every key, so the time does not reveal how much of a key is right.
        """
        if not self._digests or not is_guarded(path):
            return
        digest = _digest(given_key(headers))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            is_missing = b"authorization" not in headers and _OTHER_HEADER not in headers
            what = "no API key was given" if is_missing else "the API key is not one of this server's"
            raise ApiError(
                401, f"{what}; send the header Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key"
            )


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key that a request has in one of two headers; empty if it has none."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else headers.get(_OTHER_HEADER, b"").strip()


def is_guarded(path: str) -> bool:
    """Return whether the path needs a key: every path that makes the model or its tokenizer work."""
    return path.startswith(_GUARDED)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- names and pages -------------------------------------------------------------------------------------------------


ANY = "*"
_MOST_QUOTED_CHARS = 100
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::\d{0,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::\d{1,5})?")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowedHosts:
    """The names and addresses that are accepted in the header `Host`, at any port.

    Loopback names and the server's own address are always allowed. A server that listens on all addresses accepts any
    address, since no page can choose one for itself, but only the given names.
    """

    def __init__(self, listened_on: str, named: Iterable[str]) -> None:
        """Allow the address listened on and the given names; "*" among them allows all."""
        names = {check_host(name) for name in named}
        self._allows_all = ANY in names
        address = as_address(listened_on)
        self._allows_addresses = address is not None and address.is_unspecified
        self._names = names | {"localhost", listened_on.lower() if address is None else str(address)}

    def check(self, given: list[bytes]) -> None:
        """Admit a request with these `Host` headers.

        Raises: ApiError 400 unless there is exactly one, 421 if it has another name.
        """
        if self._allows_all:
            return
        if len(given) != 1:
            what = "is missing" if not given else "is there more than once"
            raise ApiError(400, f"the header Host {what}; send it once, with the server's name", code="bad_host")
        authority = given[0].decode("latin-1").strip()
        if not self.is_allowed(host_of(authority)):
            raise ApiError(
                421,
                f"this server does not answer to the name {authority[:_MOST_QUOTED_CHARS]!r}; use localhost or "
                "the address that it listens on, or start it with --allowed-host NAME",
                code="host_not_allowed",
            )

    def is_allowed(self, host: str | None) -> bool:
        """Return whether the server answers requests to this name."""
        if host is None:
            return False
        address = as_address(host)
        if address is None:
            return host in self._names
        return self._allows_addresses or address.is_loopback or str(address) in self._names


class AllowedOrigins:
    """Origins of the web pages that may send requests: the server's own page, and the origins named."""

    def __init__(self, named: Iterable[str]) -> None:
        """Allow the given origins; "*" among them allows all."""
        self.named = tuple(dict.fromkeys(check_origin(one) for one in named))

    def check(self, origin: bytes | None, host: bytes) -> None:
        """Admit a request that comes from no page, or from an allowed one. Raises: ApiError 403."""
        if origin is None or ANY in self.named:
            return
        given = origin.decode("latin-1").strip().lower()
        if given in self.named or given.partition("://")[2] == host.decode("latin-1").strip().lower():
            return
        raise ApiError(
            403,
            f"pages of {given[:_MOST_QUOTED_CHARS]!r} may not use this server; start it with --cors-origin ORIGIN",
            code="origin_not_allowed",
        )


def host_of(authority: str) -> str | None:
    """Return the name or address in a `Host` header, without port, brackets and last dot; None if it has none."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].strip("[]").removesuffix(".") if match else None


def check_host(name: str) -> str:
    """Return a name for `AllowedHosts` in the form that is compared. Raises: SettingsError if it is not a host name."""
    if name == ANY:
        return name
    address = as_address(name.strip("[]"))
    host = str(address) if address is not None else host_of(name)
    if not host or (address is None and ":" in name):
        raise SettingsError(f"an allowed host must be a name or an address without port, or {ANY}, got {name!r}")
    return host


def check_origin(origin: str) -> str:
    """Return an origin for `AllowedOrigins` in the form that browsers send. Raises: SettingsError if it is not one."""
    if origin == ANY:
        return origin
    if not _ORIGIN.fullmatch(origin.lower()):
        raise SettingsError(
            f"an origin must look like https://app.example or http://localhost:3000, without a path, or be {ANY}; "
            f"got {origin!r}"
        )
    return origin.lower()


def as_address(host: str) -> _Address | None:
    """Return the IP address that ``host`` is; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])  # the rest names a network interface
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
