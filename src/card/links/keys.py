"""Keys and addresses of draft servers: which clients may connect, and from where they may do so without keys."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from card.errors import SettingsError

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SERVER, _CLIENT, _CLIENTS = "server", "client", "clients"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's own pair, and the folder with the public keys of its clients."""

    public: bytes
    secret: bytes
    clients: Path


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The client's own pair, and the public key of the server that it trusts."""

    public: bytes
    secret: bytes
    server: bytes


def check_address(address: str, *, binds: bool = False) -> str:
    """Return a valid ``address`` to connect to, or with ``binds`` to listen on. Raises: SettingsError for another."""
    match = _TCP.fullmatch(address)
    if not match or (not binds and (match[1] in ("*", "0.0.0.0") or match[2] in ("*", "0"))):
        example = "tcp://127.0.0.1:5555 (port 0 takes a free one)" if binds else "tcp://192.168.1.20:5555"
        raise SettingsError(f"the address of a draft server must look like {example}, got {address!r}")
    if match[2] != "*" and int(match[2]) > 65535:
        raise SettingsError(f"a port is at most 65535, got {address!r}")
    return address


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of a checked address; 0.0.0.0 means all hosts, port 0 a free port."""
    match = _TCP.fullmatch(address)
    assert match is not None
    host = match[1].strip("[]")
    return "0.0.0.0" if host == "*" else host, 0 if match[2] == "*" else int(match[2])


def check_may_listen(address: str, *, has_keys: bool) -> None:
    """Refuse a malformed address, or one that other machines can reach without keys. Raises: SettingsError."""
    check_address(address, binds=True)
    if not has_keys and not is_loopback(address):
        raise SettingsError(
            f"{address} can be reached from other machines, so the server needs keys: make them with "
            "`card keys DIR` and start with --keys DIR/server, or listen on tcp://127.0.0.1:PORT"
        )


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach a checked address."""
    match = _TCP.fullmatch(address)
    host = match[1].strip("[]") if match else ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_keys(folder: Path, clients: Sequence[str] = ()) -> list[Path]:
    """Make the keys of a server and its clients, each in the folder for its machine.

    ``folder/server`` is for the server, ``folder/NAME`` for each client. If clients are named, an existing server keeps
    its keys and accepts the new clients.

    Returns: the new folders.
    Raises: SettingsError if keys would be overwritten or cannot be written, or a name is not a file name.
    """
    server = folder / _SERVER
    names = list(clients) or [_CLIENT]
    for name in names:
        if not _NAME.fullmatch(name) or name == _SERVER:
            raise SettingsError(f"a client's name must be letters, digits, - _ . and not {_SERVER!r}, got {name!r}")
    new = [folder / name for name in dict.fromkeys(names)]
    if not (clients and server.exists()):
        new.insert(0, server)
    for path in new:
        if path.exists():
            raise SettingsError(f"{path} exists already and is not overwritten; remove it, or choose another folder")
    try:
        _write_keys(server, new)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(
            f"keys cannot be written to {error.filename or folder}: {reason}; choose another folder"
        ) from error
    return new


def load_server_keys(folder: Path) -> ServerKeys:
    """Read what `make_keys` wrote for the server. Raises: SettingsError if it is not there or cannot be read."""
    public, secret = _load(folder / f"{_SERVER}.key_secret", "a server")
    clients = folder / _CLIENTS
    if not any(clients.glob("*.key")):
        raise SettingsError(f"{clients} holds no public key: no client could connect; make one with `card keys`")
    return ServerKeys(public, secret, clients)


def load_client_keys(folder: Path) -> ClientKeys:
    """Read what `make_keys` wrote for a client. Raises: SettingsError if it is not there or cannot be read."""
    public, secret = _load(folder / f"{_CLIENT}.key_secret", "a client")
    server, _ = _load(folder / f"{_SERVER}.key", "a client", needs_secret=False)
    return ClientKeys(public, secret, server)


def _write_keys(server: Path, new: Sequence[Path]) -> None:
    """Fill the new folders; the server's, if new, comes first. Raises: OSError."""
    for path in new:
        path.mkdir(mode=0o700, parents=True)
    if server in new:
        (server / _CLIENTS).mkdir()
        _make_pair(server, _SERVER)
    for path in new:
        if path != server:
            _make_pair(path, _CLIENT)
            (server / _CLIENTS / f"{path.name}.key").write_bytes((path / f"{_CLIENT}.key").read_bytes())
            (path / f"{_SERVER}.key").write_bytes((server / f"{_SERVER}.key").read_bytes())


def _make_pair(folder: Path, name: str) -> None:
    zmq.auth.create_certificates(folder, name)
    (folder / f"{name}.key_secret").chmod(0o600)


def _load(path: Path, whose: str, *, needs_secret: bool = True) -> tuple[bytes, bytes]:
    advice = f"give the folder that `card keys` made for {whose}"
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise SettingsError(f"no key can be read from {path} ({error}); {advice}") from error
    if needs_secret and secret is None:
        raise SettingsError(f"{path} holds no secret key; {advice}")
    return public, secret or b""
