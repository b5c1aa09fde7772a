"""Refusals of what no command can mean: odd numbers, options that nothing reads, outputs that are inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from card.cli.parts.files import refuse_losses
from card.cli.parts.other_names import what_to_write
from card.cli.parts.sections import CardOption

_MAY_BE_EMPTY = frozenset({"prompt", "system"})  # the first is refused in words of its own
_INTEGERS = range(-(2**63), 2**63)


class ModeOption(CardOption):
    """An option that is read in one mode of its command: only beside one of some options, or beside none of others."""

    def __init__(self, *args: Any, beside: Sequence[str] = (), apart_from: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.beside, self.apart_from = tuple(beside), tuple(apart_from)

    def refuse_elsewhere(self, context: click.Context) -> None:
        """Raise UsageError if it is given where nothing reads it."""
        if not _is_given(self, context):
            return
        others = {one.name: one for one in context.command.params if _is_given(one, context)}
        flag, needed = self.opts[0], [f"--{name.replace('_', '-')}" for name in self.beside]
        if needed and others.keys().isdisjoint(self.beside):
            raise click.UsageError(f"{flag} goes with {' or '.join(needed)}; give that too, or leave {flag} out")
        for name in self.apart_from:
            if name in others:
                raise click.UsageError(f"{flag} does nothing beside {others[name].opts[0]}; leave one of the two out")


def refuse_what_cannot_be_meant(command: click.Command, context: click.Context) -> None:
    """Refuse values and options that a command has read.

    Raises: UsageError for what only Python takes for a number, for an empty text, and for an option that nothing reads
        beside the others; SettingsError if an output is an input too.
    """
    if not context.resilient_parsing:
        for one in command.params:
            _refuse_odd_numbers(one, context)
            _refuse_empty_texts(one, context)
            if isinstance(one, ModeOption):
                one.refuse_elsewhere(context)
    refuse_losses(command, context)


def refuse_other_names(command: click.Command, context: click.Context, given: list[str], error: Exception) -> None:
    """Answer an option of another program with ours, or with why there is none. Raises: UsageError."""
    known = {name for one in command.get_params(context) for name in (*one.opts, *one.secondary_opts)}
    if (words := what_to_write(given, known)) is not None:
        raise click.UsageError(words, context) from error


def _is_given(param: click.Parameter, context: click.Context) -> bool:
    return context.get_parameter_source(param.name or "") not in (None, ParameterSource.DEFAULT)


def _refuse_empty_texts(param: click.Parameter, context: click.Context) -> None:
    """Raise UsageError for a text without a character, as of a shell's variable that is not set."""
    value = context.params.get(param.name or "")
    is_text = isinstance(param.type, click.types.StringParamType) and param.name not in _MAY_BE_EMPTY
    if is_text and "" in _flat(value):
        name = param.human_readable_name.strip("[]") if isinstance(param, click.Argument) else param.opts[0]
        raise click.UsageError(f"{name} must not be empty; give it a value, or leave it out", context)


def _flat(value: Any) -> list[Any]:
    """Return the values of a parameter that may be given several times, or takes several words."""
    return [one for part in value for one in _flat(part)] if isinstance(value, tuple) else [value]


def _refuse_odd_numbers(param: click.Parameter, context: click.Context) -> None:
    """Raise BadParameter for NaN, and for a number that no other program could hold."""
    value = context.params.get(param.name or "")
    for number in _flat(value):
        if isinstance(number, float) and math.isnan(number):
            raise click.BadParameter("nan is no number; give another", context, param)
        if isinstance(number, int) and number not in _INTEGERS:
            raise click.BadParameter(f"{number} takes more than 64 bits; give a smaller one", context, param)
