"""Help in sections: the common options in --help, and all of them in --help-all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
SECTIONS = (
    "Models",
    "Method",
    "Draft server",
    "Text",
    "Comparison",
    "Form of the answer",
    "Machine",
    "Drafting",
    "Images",
    "Server",
)
_OTHERS, _HELP = "Options", "Help"  # first and last
_OWN = frozenset({"--verbose", "--help-all", "--help"})  # in the last section
_SHORT = 20  # a command with at most as many options shows them all
_ALL = "card.help_all"


class CardOption(click.Option):
    """An option that knows its place in the help."""

    def __init__(self, *args: Any, section: str = "", is_common: bool = True, **settings: Any) -> None:
        """Declare an option.

        Args:
            section: empty: that of other options.
            is_common: shown by --help too, not only by --help-all.
            settings: as of `click.Option`.
        """
        super().__init__(*args, **settings)
        self.section, self.is_common = section, is_common


def option(*flags: str, section: str = "", **how: Any) -> Callable[[F], F]:
    """Return an option that is no setting; arguments as of `CardOption`."""
    return click.option(*flags, cls=CardOption, section=section, **how)


def section_of(one: click.Parameter) -> str:
    """Return the section of an option; empty if it has none."""
    return one.section if isinstance(one, CardOption) else ""


def is_common(one: click.Parameter) -> bool:
    """Return whether --help shows an option."""
    return not isinstance(one, CardOption) or one.is_common


def write_sections(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the sections of a command; rare options only if all are requested."""
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    listed = [one for one in options if not _is_ours(one)]
    rare = [one for one in listed if not is_common(one)]
    has_more = len(listed) > _SHORT and bool(rare)
    shows_all = not has_more or context.meta.get(_ALL, False)
    rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (_OTHERS, *SECTIONS)}
    for one in sorted(listed, key=lambda one: shows_all and not is_common(one)):
        record = one.get_help_record(context)
        if record and (shows_all or is_common(one)):
            rows.setdefault(section_of(one) or _OTHERS, []).append(record)
    shown = [one for one in options if _is_ours(one) and (has_more or one.name != "help_all")]
    rows[_HELP] = [record for one in shown if (record := one.get_help_record(context))]
    _write(rows, formatter)
    if not shows_all:
        formatter.write_paragraph()
        formatter.write_text(f"{len(rare)} more options: {context.command_path} --help-all")


def full_help(shown: click.Command, context: click.Context) -> str:
    """Return the output of --help-all."""
    context.meta[_ALL] = True
    return shown.get_help(context)


def _is_ours(one: click.Option) -> bool:
    return not _OWN.isdisjoint(one.opts)


def _write(rows: dict[str, list[tuple[str, str]]], formatter: click.HelpFormatter) -> None:
    for title, lines in rows.items():
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines)
