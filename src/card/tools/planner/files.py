"""Profiles and recordings as files; a broken file, or one of another kind or version, raises an error of one line."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from card.cli.parts.files import writing
from card.errors import PlanError, SettingsError

T = TypeVar("T", bound=msgspec.Struct)


class _Head(msgspec.Struct):
    """Fields at the beginning of every such file."""

    kind: str = ""
    version: int = 0


def read_file(
    path: Path, type_: type[T], kind: str, version: int, decode: Callable[..., Any], check: Callable[[T], None]
) -> T:
    """Return the content of a file, decoded and checked. Raises: PlanError."""
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # editors put it before a file for --edge
    except OSError as error:
        raise PlanError(f"cannot read the {kind} {path}: {error.strerror}") from error
    try:
        head: _Head = decode(data, type=_Head)
        if (head.kind, head.version) == (kind, version):
            value: T = decode(data, type=type_)
            check(value)
            return value
    except (msgspec.DecodeError, UnicodeDecodeError, PlanError, SettingsError) as error:
        raise PlanError(f"{path} is a broken {kind}: {error}; make it again") from error
    if head.kind != kind:
        found_kind = f"its kind is {head.kind!r}" if head.kind else "it states no kind"
        raise PlanError(f'{path} is no {kind} file: {found_kind}; give one with "kind": "{kind}"')
    raise PlanError(f"{path} is a {kind} of version {head.version}, this card reads version {version}; make it again")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file. Raises: SettingsError."""
    with writing(path) as place:
        place.write_bytes(data)
