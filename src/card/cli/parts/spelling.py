"""Errors about settings, in the words of the command that was typed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click
from click.core import ParameterSource

from card.errors import CardError

_FORMS = ("json_object", "json_schema", "regex")  # names of the options for the form of a text


def spelled_for(command: click.Command, setting: str) -> str:
    """Return how the setting is given to a command, a grammar as it was given; its name if it cannot be."""
    context = click.get_current_context(silent=True)
    names: tuple[str, ...] = (setting,)
    if setting == "grammar" and context is not None:
        names = tuple(name for name in _FORMS if context.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    for one in command.params:
        if one.name in names:
            return one.opts[0] if isinstance(one, click.Option) else one.human_readable_name.upper()
    return setting


def in_options(error: CardError) -> str:
    """Return the text of an error that does not end the running command, with the command's options."""
    context = click.get_current_context(silent=True)
    return str(error) if context is None else error.spelled(lambda setting: spelled_for(context.command, setting))


@contextlib.contextmanager
def naming_options(command: click.Command) -> Iterator[None]:
    """Let an error of the block name the command's options instead of settings."""
    try:
        yield
    except CardError as error:
        error.args = (error.spelled(lambda setting: spelled_for(command, setting)), *error.args[1:])
        raise
