"""Help in sections, the common options in --help and all of them in --help-all; -v for every command."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from card.cli.files import refuse_losses
from card.cli.other_names import what_to_write
from card.config.fields import declared
from card.config.record import Command
from card.config.registry import commands, own_settings
from card.errors import CardError
from card.machine.importing import load_place

_INTEGERS = range(-(2**63), 2**63)
_SHORT = 20  # a command with at most as many options shows them all


# By title: the common options, and those only in --help-all. Options not named here stand under "Options".
_SECTIONS = {
    "Models": (
        "model target draft pair dtype device max_model_len",
        "draft_model draft_dtype draft_vocab draft_device target_cost answer_format chat_template tool_template",
    ),
    "Method": ("method methods writers", "placement schedule policy"),
    "Draft server": ("draft_address draft_keys draft_optional", ""),
    "Text": (
        "max_tokens temperature top_p seed stop",
        "top_k min_p min_tokens ignore_eos presence_penalty frequency_penalty repetition_penalty logit_bias speculates",
    ),
    "Comparison": ("reference reference_model reference_api_key plain_fields logprob_tolerance only skip", ""),
    "Form of the answer": ("json_object json_schema regex", ""),
    "Machine": (
        "threads max_num_seqs",
        "kernels draft_threads cores draft_cores kv_cache_memory kv_offload prefix_cache "
        "prefix_cache_size prefill_chunk "
        "wait_for_drafter cache check cache_dir drafter_timeout_s",
    ),
    "Drafting": (
        "",
        "verify beam_width branch budget min_verify_prob lead num_speculative_tokens coupled_noise max_wait_s "
        "min_depth waits_after_miss growth branch_below fan_out sps_lengths coupling_report",
    ),
    "Images": ("", "max_images image_dir hide_images"),
    "Server": (
        "config host port served_model_names api_keys no_key allowed_hosts cors_origins",
        "max_connections head_timeout_s body_timeout_s grammar_timeout_s max_num_queued_reqs "
        "max_request_bytes max_request_tokens first_token_timeout_s request_timeout_s ping_interval_s "
        "stall_timeout_s shutdown_timeout_s generation_config strict_fields spec_metrics log_level",
    ),
}
_OWN_RULES = {name: declared(kind)[name].rule for name, kind in own_settings().items()}
_RARE = frozenset(name for _, rare in _SECTIONS.values() for name in rare.split()) | {
    name for name, rule in _OWN_RULES.items() if not rule.is_common
}
TITLE_OF = {name: title for title, names in _SECTIONS.items() for name in " ".join(names).split()} | {
    name: rule.section for name, rule in _OWN_RULES.items() if rule.section
}
_TITLES = ("Options", *_SECTIONS, "Help")
_OWN = ("--verbose", "--help-all", "--help")  # in the section "Help"


class ModeOption(click.Option):
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


def _is_given(param: click.Parameter, context: click.Context) -> bool:
    return context.get_parameter_source(param.name or "") not in (None, ParameterSource.DEFAULT)


def _refuse_odd_numbers(param: click.Parameter, context: click.Context) -> None:
    """Raise BadParameter for a number that is none, or that no other program could hold."""
    value = context.params.get(param.name or "")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and math.isnan(number):
            raise click.BadParameter("nan is no number; give another", context, param)
        if isinstance(number, int) and number not in _INTEGERS:
            raise click.BadParameter(f"{number} takes more than 64 bits; give a smaller one", context, param)


class CardCommand(click.Command):
    """A command whose help has sections and a short form, and that takes -v."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += [_VERBOSE, _HELP_ALL]

    def invoke(self, context: click.Context) -> Any:
        """Run the command; an error names its options."""
        with self._naming_options():
            return super().invoke(context)

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        """Read the options; an error names them."""
        with self._naming_options():
            return super().make_context(*args, **settings)

    def spelled(self, setting: str) -> str:
        """Return how the setting is given to this command; its name if it cannot be."""
        for one in self.params:
            if one.name == setting:
                return one.opts[0] if isinstance(one, click.Option) else one.human_readable_name.upper()
        return setting

    @contextlib.contextmanager
    def _naming_options(self) -> Iterator[None]:
        try:
            yield
        except CardError as error:
            error.args = (error.spelled(self.spelled), *error.args[1:])
            raise

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the options, and refuse what cannot be meant.

        Raises: UsageError for what only Python takes for a number, and for an option that nothing reads beside the
            others; SettingsError if an output is an input too.
        """
        rest = self._read(context, args)
        if not context.resilient_parsing:
            for one in self.params:
                _refuse_odd_numbers(one, context)
                if isinstance(one, ModeOption):
                    one.refuse_elsewhere(context)
        refuse_losses(self, context)
        return rest

    def _read(self, context: click.Context, args: list[str]) -> list[str]:
        """Read as click does; an option of another program is answered with ours, or with why there is none."""
        given = list(args)
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            known = {name for one in self.get_params(context) for name in (*one.opts, *one.secondary_opts)}
            if (words := what_to_write(given, known)) is None:
                raise
            raise click.UsageError(words, context) from error

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections; rare options only if all are requested."""
        options = [one for one in self.get_params(context) if isinstance(one, click.Option)]
        own = [one for one in options if not set(one.opts).intersection(_OWN)]
        has_more = len(own) > _SHORT and any(one.name in _RARE for one in own)
        shows_all = not has_more or context.meta.get(_ALL, False)
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in _TITLES}
        for one in sorted(own, key=lambda one: shows_all and one.name in _RARE):
            record = one.get_help_record(context)
            if record and (shows_all or one.name not in _RARE):
                rows[TITLE_OF.get(one.name or "", "Options")].append(record)
        for one in options:
            if one not in own and (has_more or one.name != "help_all"):
                record = one.get_help_record(context)
                rows["Help"] += [record] if record else []
        for title, lines in rows.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)
        if not shows_all:
            num_more = sum(one.name in _RARE for one in own)
            formatter.write_paragraph()
            formatter.write_text(f"{num_more} more options: {context.command_path} --help-all")


class _Imported(MutableMapping[str, click.Command]):
    """The commands of a table by name; each is imported when it is read."""

    def __init__(self, table: dict[str, Command]) -> None:
        self._table = table
        self._added: dict[str, click.Command] = {}  # added through click

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._added:
            self._added[name] = load_place(self._table[name].place)
        return self._added[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._table[name] = Command(name, command.get_short_help_str(), "")
        self._added[name] = command

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class CardGroup(click.Group):
    """A group of such commands; each is imported when it is used."""

    def __init__(self, *args: Any, own: Sequence[Command] = (), under: str = "", **settings: Any) -> None:
        """Include the group's own commands, which come first, and those that records have under its name."""
        super().__init__(*args, **settings)
        self.params.append(_VERBOSE)
        self._table = {one.name: one for one in own} | commands(under)
        self.commands = _Imported(self._table)

    def list_commands(self, _: click.Context | None = None) -> list[str]:
        """Return the names in order, the most used first."""
        return list(self.commands)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.summary + one.needs) for name, one in self._table.items()])

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Take a group without anything else as a question for its help."""
        return super().parse_args(context, args or ["--help"])

    def invoke(self, context: click.Context) -> Any:
        """Run a command; Ctrl-C must not reach click, which would write an empty line to standard error."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupt:
            raise click.Abort from interrupt


_ALL = "card.help_all"


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], CardCommand]:
    """Declare a command; settings as in `click.command`."""
    return click.command(name, cls=CardCommand, **settings)


def full_help(shown: click.Command, context: click.Context) -> str:
    """Return the output of --help-all."""
    context.meta[_ALL] = True
    return shown.get_help(context)


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


_VERBOSE = click.Option(
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
