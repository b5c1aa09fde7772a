"""Values for settings and options, found from their declarations: one that may be given, and one that may not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from card.config.fields import Setting, declared
from card.errors import SettingsError

_NAMES = ("auto", "2GiB", "300M", "tcp://127.0.0.1:1", "sparse", "relaxed:0.5", "suffix", "cpu", "x")


def other_value(owner: type[Any], name: str, **beside: Any) -> Any:
    """Return a value that a setting of a class may have beside others, and that is not its default."""
    one = declared(owner)[name]
    others = (value for value in _candidates(one) if one.plain(value) != one.default)
    return next(value for value in others if _holds(owner, {**beside, name: value}))


def _holds(owner: type[Any], given: Mapping[str, Any]) -> bool:
    try:
        owner(**given)
    except SettingsError:
        return False
    return True


def _candidates(one: Setting) -> Iterator[Any]:
    yield from one.choices
    if one.kind is bool:
        yield not one.default
        return
    numbers = [value for value in (one.rule.bounds.least, 2, 3, 65536) if value is not None]
    kinds = {int: numbers, float: (0.5, 0.25, -1.0, 2.0)}
    yield from ((value,) if one.is_list else value for value in kinds.get(one.kind, _NAMES))


def typed(value: Any) -> str:
    """Return a value as it is typed."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def held_by(option: click.Option, folder: Path) -> list[str]:
    """Return what may be typed for an option, its flag first."""
    if option.is_flag:
        return [option.opts[0]]
    kind, file = option.type, folder / "there.json"
    if isinstance(kind, click.types.FuncParamType):
        return [option.opts[0], "1"]
    if isinstance(kind, click.Choice):
        value = str(kind.choices[0])
    elif isinstance(kind, click.IntRange | click.FloatRange):
        value = str(kind.min if kind.min is not None else kind.max)
    elif isinstance(kind, click.Path) and kind.exists:
        value = str(file if kind.file_okay else folder)
    elif isinstance(kind, click.File):
        value = str(file)
    elif isinstance(kind, click.Path):
        value = str(folder / "new")
    else:
        value = "1"
    return [option.opts[0], *[value] * option.nargs]


def refused_by(option: click.Option, folder: Path) -> list[str] | None:
    """Return what may not be typed for an option, its flag first; None if anything may."""
    kind = option.type
    if option.is_flag:
        return [f"{option.opts[0]}=1"]
    if isinstance(kind, click.Choice):
        value = "no-such-choice"
    elif (isinstance(kind, click.Path) and kind.exists) or (isinstance(kind, click.File) and "r" in kind.mode):
        value = str(folder / "missing")
    elif isinstance(kind, click.IntRange | click.FloatRange):
        value = "x" if kind.min is None else str(kind.min - 1)
    elif kind in (click.INT, click.FLOAT):
        value = "x"
    else:
        return None
    return [option.opts[0], *[value] * option.nargs]


def every_command(group: click.Group) -> list[tuple[str, click.Command]]:
    """Return all commands of a group and of groups in it, by what is typed."""
    found: list[tuple[str, click.Command]] = []
    for name, one in group.commands.items():
        found += (
            [(f"{name} {rest}", below) for rest, below in every_command(one)] if isinstance(one, click.Group) else []
        )
        found += [] if isinstance(one, click.Group) else [(name, one)]
    return found
