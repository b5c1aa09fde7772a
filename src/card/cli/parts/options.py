"""Options that several commands share, and the objects made from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from card.cli.parts.files import NamedPath, ReadFile
from card.cli.parts.sections import CardOption, F, option
from card.config import KERNEL_KINDS, KERNELS_VARIABLE, NEUTRAL, DraftSettings, EngineSettings, Grammar, SamplingParams
from card.config.engine import MAX_THREADS
from card.config.fields import Setting, declared, require
from card.config.method import default_method
from card.config.registry import methods, own_kinds, own_settings
from card.drafting.local import writer_names
from card.errors import SettingsError, named
from card.text.lines import text_of
from card.text.parts.formats import AUTO, FORMATS

DEMO_TARGET, DEMO_DRAFT = "demo-target", "demo-draft"
NO_DRAFT = "none"
MOST_RECORDED_TOKENS = 256  # of a text that is recorded or trained on, by default
LEAST_CHECKED_TOKENS = 8  # per prompt of card check-pair: fewer give no reliable rate
_MOST_COUNTED = {"--seed": 2**63 - 1, "--threads": MAX_THREADS}  # what libraries have room for, where it is not 32 bits
_Parse = Callable[[click.Context, click.Parameter, Any], Any]


def _listed(kind: Callable[[str], Any], words: str) -> _Parse:
    """Return a callback that makes a tuple from "4,3,2", and raises click's BadParameter for anything else."""

    def parse(_: click.Context, __: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        try:
            return None if value is None else tuple(kind(part) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"must be {words}, got {value!r}") from None

    return parse


parse_numbers = _listed(int, "whole numbers such as 3 or 4,3,2")
parse_fractions = _listed(float, "numbers such as 0 or 0,5,20")
parse_cores = _listed(int, "core numbers such as 0 or 0,1")


def parse_names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the names in "a,b". Raises: click's BadParameter if there are none."""
    if value is None:
        return None
    if not (names := tuple(part.strip() for part in value.split(",") if part.strip())):
        raise click.BadParameter(f"must be names such as a,b, got {value!r}")
    return names


def parse_biases(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """Return biases by token from texts like "5=-100"; raises click's BadParameter."""
    biases: dict[int, float] = {}
    for value in values:
        token_id, bias = value.partition("=")[::2]
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"must be a token id and a number such as 5=-100, got {value!r}") from None
    return biases


def option_of(
    kind: type, name: str, *flags: str, is_filled: bool = False, shows_default: bool = True, **how: Any
) -> Callable[[F], F]:
    """Return the option of a setting; an invalid value is refused before anything is loaded.

    Args:
        kind: class of the setting.
        flags: None: the setting's own name.
        is_filled: the default is passed on like a given value.
        how: further arguments for click, which override ours.
    """
    one = declared(kind)[name]
    flag = "--" + name.replace("_", "-")
    is_pair = one.kind is bool and (one.default is not False or "/" in "".join(flags))
    flags = flags or (f"{flag}/--no-{flag[2:]}" if is_pair else flag,)
    if is_filled:
        how.setdefault("default", one.default)
    words = one.rule.meaning.removesuffix(".") + ("; may be given several times." if how.get("multiple") else ".")
    if "default" in how:
        how.setdefault("show_default", how["default"] is not None and one.kind is not bool)
    elif shows_default and one.shown:
        words += f"  [default: {one.shown}]"
    if one.kind is bool:
        how = {"default": None, "is_flag": True} | how
    elif not one.is_list and one.kind in (int, float):
        how.setdefault("type", one.kind)
    elif one.is_list and not how.get("multiple"):
        how.setdefault("callback", parse_names if one.kind is str else parse_numbers)
    how["callback"] = _checked(one, how.get("callback"))
    usual: dict[str, Any] = {"cls": CardOption, "help": words, "section": one.rule.section}
    usual["is_common"] = one.rule.is_common or not one.rule.section
    return click.option(*flags, name, **(usual | how))


def _checked(one: Setting, parse: _Parse | None) -> _Parse:
    def callback(context: click.Context, param: click.Parameter, value: Any) -> Any:
        value = parse(context, param, value) if parse is not None else value
        if value not in (None, ()) and not context.resilient_parsing:
            allowed = one.fault(value)
            require(not allowed, one.name, allowed, value)
        return value

    return callback


def options_of(kind: type, names: str, **how: Any) -> list[Callable[[F], F]]:
    """Return the options of settings, whose names are separated by blanks."""
    return [option_of(kind, name, **how) for name in names.split()]


def options_in(
    kind: type, *sections: str, how: Mapping[str, Mapping[str, Any]] | None = None, **common: Any
) -> list[Callable[[F], F]]:
    """Return the options of all settings of a class that have one.

    Args:
        sections: of the help; without any, all.
        how: what is special about some options, by name; "flags" are theirs.
        common: further arguments of all of them, as in `option_of`.
    """
    options = []
    for name, one in declared(kind).items():
        if one.rule.is_option and (not sections or one.rule.section in sections):
            details = {**common, **_SPECIAL.get(name, {}), **(how or {}).get(name, {})}
            options.append(option_of(kind, name, *details.pop("flags", ()), **details))
    return options


def counted(*flags: str, default: int | None = None, least: int = 1, words: str, section: str = "") -> Callable[[F], F]:
    """Return an option for a whole number of ``least`` or more; ``words`` are its help."""
    shows_default = default is not None
    most = next((_MOST_COUNTED[flag] for flag in flags if flag in _MOST_COUNTED), 2**31 - 1)
    kind = click.IntRange(least, most)
    return option(*flags, section=section, type=kind, default=default, show_default=shows_default, help=words)


def file_option(
    *flags: str, words: str, required: bool = False, multiple: bool = False, **how: Any
) -> Callable[[F], F]:
    """Return an option for an existing file, or several; ``words`` are its help, ``how`` as in `option_of`."""
    kind = NamedPath(exists=True, dir_okay=False, path_type=Path)
    return click.option(*flags, type=kind, required=required, multiple=multiple, help=words, **how)


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds the options to a command, in their order."""

    def add(command: F) -> F:
        for one in reversed(options):
            command = one(command)
        return command

    return add


_WRITERS = (
    f"Sources of candidates, such as beam,suffix: beam (the draft model), grammar, {', '.join(writer_names())}.  "
    "[default: by method]"
)


# What options of settings have besides that which their declarations say.
_SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "draft": {
        "help": f"Draft model, named like MODEL, mtp or {NO_DRAFT}.  "
        f"[default: {DEMO_DRAFT} beside {DEMO_TARGET}; see card pairs]"
    },
    "writers": {"help": _WRITERS},
    "answer_format": {
        "flags": ("--answer-format", "--tool-parser", "--tool-call-parser"),
        "type": click.Choice((AUTO, *FORMATS)),
    },
    **{name: {"metavar": "FILE"} for name in ("chat_template", "tool_template")},
    **{name: {"is_filled": True} for name in ("dtype", "device", "draft_threads")},
    **{name: {"callback": parse_cores} for name in ("cores", "draft_cores")},
    "draft_optional": {"flags": ("--draft-optional/--draft-required",)},
    "stop": {"multiple": True},
    "logit_bias": {
        "multiple": True,
        "callback": parse_biases,
        "metavar": "ID=VALUE",
        "help": "Add VALUE, -100 to 100, to the logit of this token; may be given several times.",
    },
    "speculates": {"flags": ("--speculation/--no-speculation",), "is_filled": True},
}


def _use_kernels(context: click.Context, _: click.Parameter, kind: str | None) -> None:
    """Set the kind for this process and the drafter's, the only ones that compile."""
    if kind is not None and not context.resilient_parsing:
        os.environ[KERNELS_VARIABLE] = kind


kernels_option = option(
    "--kernels",
    section="Machine",
    is_common=False,
    type=click.Choice(KERNEL_KINDS),
    envvar=KERNELS_VARIABLE,
    expose_value=False,
    callback=_use_kernels,
    help="Instructions that exact passes multiply with.  [default: the fastest here]",
)
pair_options = with_options(
    option_of(EngineSettings, "target"), option_of(EngineSettings, "draft", **_SPECIAL["draft"])
)
model_options = with_options(
    *options_in(EngineSettings, "Models"), kernels_option, *options_in(EngineSettings, "Machine")
)


def own_option(name: str, **how: Any) -> Callable[[F], F]:
    """Return the option of a setting that a folder beside the core declares; arguments as in `option_of`."""
    return option_of(own_settings()[name], name, **how)


method_options = with_options(  # of method and draft server
    *options_in(
        EngineSettings,
        "Method",
        how={
            "method": {
                "shell_complete": lambda _, __, begun: [name for name in methods() if name.startswith(begun)],
                "help": f"One of {', '.join(methods())}.  "
                f"[default: {default_method(has_draft=True)}; {default_method(has_draft=False)} without a draft model]",
            }
        },
    ),
    *(one for kind in own_kinds() for one in options_in(kind)),
    *options_in(EngineSettings, "Draft server"),
)
draft_options = with_options(*options_in(DraftSettings, "Drafting", shows_default=False))
_form = partial(option, section="Form of the answer")
sampling_options = with_options(
    *options_in(SamplingParams),
    _form("--json-object", is_flag=True, help="Answer with a JSON object."),
    _form("--json-schema", type=ReadFile("rb"), help="Answer with JSON of this schema."),
    _form("--regex", help="Answer with a text that this whole expression matches."),
)
neutral_options = with_options(  # of commands that measure: they ignore the model's generation config
    *(
        option_of(SamplingParams, name, default=value, show_default=name == "temperature")
        for name, value in NEUTRAL.items()
        if name != "repetition_penalty"
    ),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
wide_option = click.option("--wide", is_flag=True, help="Show all columns of the tables.")


def pop_sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Remove the sampling options from ``options`` and return them. Raises: SettingsError for a value out of range."""
    values = {name: options.pop(name, None) for name in declared(SamplingParams)}
    return SamplingParams(**given(values), grammar=_pop_grammar(options))


def _pop_grammar(options: dict[str, Any]) -> Grammar | None:
    """Remove the options for the form of the text. Raises: SettingsError for more than one."""
    is_object, schema, regex = (options.pop(name, None) for name in ("json_object", "json_schema", "regex"))
    if bool(is_object) + (schema is not None) + (regex is not None) > 1:
        raise SettingsError("--json-object, --json-schema and --regex exclude each other; give only one")
    if schema is not None:
        return Grammar("json_schema", text_of(schema.read(), schema.name, SettingsError))
    if regex is not None:
        return Grammar("regex", regex)
    return Grammar("json_object") if is_object else None


def rename_option(options: dict[str, Any], alias: str, name: str) -> None:
    """Move an alias of an option to its own name. Raises: SettingsError if both are given and differ."""
    value = options.pop(alias)
    if value is None:
        return
    if options[name] not in (None, value):
        raise SettingsError(f"{named(name)} is given twice, as {options[name]!r} and as {value!r}; leave one out")
    options[name] = value


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave a value; the rest keep the defaults of the settings."""
    return {name: value for name, value in options.items() if value is not None}
