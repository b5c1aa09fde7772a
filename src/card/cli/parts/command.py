"""A command of `card`, and -v and --help-all, which every one takes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import click

from card.cli.parts.refusals import refuse_other_names, refuse_what_cannot_be_meant
from card.cli.parts.sections import full_help, write_sections
from card.cli.parts.spelling import naming_options


class CardCommand(click.Command):
    """A command whose help has sections, whose errors name its options, and that refuses what cannot be meant."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += [VERBOSE, _HELP_ALL]

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        with naming_options(self):
            return super().invoke(context)

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        """Read the options."""
        with naming_options(self):
            return super().make_context(*args, **settings)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the options. Raises: as `refuse_what_cannot_be_meant`, and UsageError for an unknown option."""
        given = list(args)
        try:
            rest = super().parse_args(context, args)
        except click.NoSuchOption as error:
            refuse_other_names(self, context, given, error)
            raise
        refuse_what_cannot_be_meant(self, context)
        return rest

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        write_sections(self, context, formatter)


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], CardCommand]:
    """Declare a command; settings as in `click.command`."""
    return click.command(name, cls=CardCommand, **settings)


class StderrHandler(logging.Handler):
    """Writes log lines to the present standard error, so that they do not break a spinner's line."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or a full disk must not end the command
            click.echo(self.format(record), err=True)


def _set_verbose(_: click.Context, __: click.Parameter, is_verbose: bool) -> None:
    if is_verbose:
        logging.getLogger().setLevel(logging.INFO)


def _show_all(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        click.echo(full_help(context.command, context))
        context.exit()


VERBOSE = click.Option(
    ["-v", "--verbose"],
    is_flag=True,
    expose_value=False,
    callback=_set_verbose,
    help="Log the drafter's events to standard error.",
)
_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_show_all,
    help="Show all options and exit.",
)
