"""Profiles and recordings as files: one line of error for what is broken, of another version, or something else."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from card.errors import PlanError

T = TypeVar("T", bound=msgspec.Struct)


class _Head(msgspec.Struct):
    """What every such file begins with."""

    kind: str = ""
    version: int = 0


def check_head(head: _Head, path: Path, kind: str, version: int) -> None:
    """Raise PlanError unless the file says that it is of this kind and version."""
    if head.kind != kind:
        raise PlanError(f"{path} is no {kind}{f' but a {head.kind}' if head.kind else ''}; give one made by card")
    if head.version != version:
        raise PlanError(
            f"{path} is a {kind} of version {head.version}, this card reads version {version}; make it again"
        )


def read_json(path: Path, type_: type[T], kind: str, version: int) -> T:
    """Return what a JSON file holds. Raises: PlanError."""
    data = read_bytes(path, kind)
    try:
        check_head(msgspec.json.decode(data, type=_Head), path, kind, version)
        return msgspec.json.decode(data, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is a broken {kind}: {error}; make it again") from error


def read_msgpack(path: Path, type_: type[T], kind: str, version: int) -> T:
    """Return what a msgpack file holds. Raises: PlanError."""
    data = read_bytes(path, kind)
    try:
        check_head(msgspec.msgpack.decode(data, type=_Head), path, kind, version)
        return msgspec.msgpack.decode(data, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is a broken {kind}: {error}; make it again") from error


def read_bytes(path: Path, kind: str) -> bytes:
    """Return the content of a file. Raises: PlanError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read the {kind} {path}: {error.strerror}") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file. Raises: PlanError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error
