"""`card serve`, `card draft-server` and the keys of the latter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from card.cli.parts.chosen_models import choose_models
from card.cli.parts.command import command
from card.cli.parts.fetching import fetch_models
from card.cli.parts.files import NamedPath
from card.cli.parts.options import (
    DEMO_DRAFT,
    counted,
    draft_options,
    given,
    kernels_option,
    method_options,
    model_options,
    option_of,
    options_in,
    parse_cores,
    rename_option,
    with_options,
)
from card.cli.parts.remarks import hint_at_int8
from card.cli.parts.sections import F, option
from card.cli.parts.starting import load, run, spinner, start_drafter_child
from card.config import DraftSettings, EngineSettings
from card.config.fields import declared
from card.errors import SettingsError
from card.machine.packages import install_command
from card.server.config import ServerSettings, known_as, read_config_file
from card.server.listening import bind

if TYPE_CHECKING:
    from card.api.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_EXTRA = {
    "fastapi": "fastapi",
    "prometheus_client": "prometheus_client",
    "pydantic": "pydantic",
    "uvicorn": "uvicorn",
    "yaml": "PyYAML",
}
_PREFIX = "CARD"  # of the environment's names: CARD_MAX_NUM_SEQS is --max-num-seqs
_ALIASES = {"draft_model": "draft", "model": "target"}  # other spellings of an option of all commands
_FLAGS = {  # of settings of the server whose options have names of their own
    "served_model_names": ("--served-model-name", "--alias"),
    "api_keys": ("--api-key",),
    "allowed_hosts": ("--allowed-host",),
    "cors_origins": ("--cors-origin",),
    "max_num_queued_reqs": ("--max-num-queued-reqs", "--max-queued-requests"),
    "spec_metrics": ("--per-request-spec-decode-metrics",),
}
_OF_ENGINES: Mapping[str, Mapping[str, Any]] = {  # what is special about options of engines that only a server has
    "max_images": {"default": 0},
    "grammar_timeout_s": {"flags": ("--grammar-timeout",), "envvar": f"{_PREFIX}_GRAMMAR_TIMEOUT"},
    "generation_config": {"type": click.Choice(declared(EngineSettings)["generation_config"].choices)},
}
_METAVARS = {"allowed_hosts": "NAME", "cors_origins": "ORIGIN"}


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Use the file's values for options that neither the command line nor the environment gives."""
    if path is None:
        return
    _require_extra()
    options = [p for p in context.command.params if isinstance(p, click.Option) and p.expose_value]
    by_flag = {flag.lstrip("-").replace("-", "_"): p for p in options for flag in p.opts}
    defaults: dict[str, Any] = {}
    for name, value in read_config_file(path, by_flag).items():
        option = by_flag[name]
        assert option.name is not None
        several = value if isinstance(value, tuple) else (value,)
        is_joined = isinstance(value, tuple) and not option.multiple
        defaults[option.name] = several if option.multiple else ",".join(map(str, several)) if is_joined else value
    context.default_map = {**(context.default_map or {}), **defaults}


def _server_option(name: str) -> Callable[[F], F]:
    one = declared(ServerSettings)[name]
    flags = _FLAGS.get(name) or ("--" + name.removesuffix("_s").replace("_", "-"),)
    how: dict[str, Any] = {"type": click.Choice(one.choices)} if one.choices else {}
    envvar = f"{_PREFIX}_{flags[0][2:].replace('-', '_').upper()}"
    return option_of(
        ServerSettings, name, *flags, envvar=envvar, multiple=one.is_list, metavar=_METAVARS.get(name), **how
    )


_server_options = with_options(
    option(
        "--config",
        section="Server",
        type=NamedPath(path_type=Path, exists=True, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="YAML file of these options; the command line and CARD_* variables come first.",
    ),
    *(_server_option(name) for name in ("host", "port")),
    option("--model", section="Models", help="Same as MODEL and --target."),
    option(
        "--draft-model",
        "--model-draft",
        "--speculative-model",
        section="Models",
        is_common=False,
        help="Same as --draft.",
    ),
    *(_server_option(name) for name in declared(ServerSettings) if name not in ("host", "port")),
)


@command(short_help="Serve a model over HTTP.", context_settings={"auto_envvar_prefix": _PREFIX})
@_server_options
@click.argument("model_argument", metavar="[MODEL]", required=False)
@with_options(*options_in(EngineSettings, "Images", "Server", how=_OF_ENGINES))
@with_options(*options_in(DraftSettings, "Images"))
@method_options
@draft_options
@model_options
def serve(model_argument: str | None, **options: Any) -> None:
    """Serve MODEL (a folder, a GGUF file, a hub name, or demo-target) to clients of OpenAI's API, until interrupted.

    Every option may also be given as an environment variable (CARD_MAX_NUM_SEQS for --max-num-seqs) or in the file
    of --config; the command line comes first, then the environment, then the file.
    """
    _require_extra()
    changes = {name: options.pop(name) for name in declared(ServerSettings)}
    for alias, name in _ALIASES.items():
        rename_option(options, alias, name)
    if model_argument is not None:
        options["model_argument"] = model_argument
        rename_option(options, "model_argument", "target")
    chosen = choose_models(options)
    changes["served_model_names"] = changes["served_model_names"] or (known_as(chosen.target),)
    settings = ServerSettings(**{name: value for name, value in changes.items() if value not in (None, ())})
    _server("logs").set_up(settings.log_level)

    context = ""

    def make_llm() -> AsyncLLM:
        nonlocal context
        make: type[AsyncLLM] = load("card.api.async_llm").AsyncLLM
        fetch_models(chosen.target, chosen.draft)
        with spinner(f"loading {chosen.target}", write=logger.info) as say:  # log lines have a format
            llm = make(chosen.target, chosen.draft, method=chosen.method, spare=spare, say=say, **given(options))
        hint_at_int8(llm.host.could_run_int8, logger.info)
        context = f", {llm.max_model_len:,} tokens of context,"
        return llm

    def announce(address: str) -> None:
        click.echo(f"card serve: {chosen.target}{context} ready on {address}")

    with bind(settings) as listener:
        spare = start_drafter_child(chosen.method, chosen.draft, options)
        serving = _server("serving", "importing libraries")
        status = serving.serve(make_llm, settings, listener, announce=announce)
    raise SystemExit(status)


def _require_extra() -> None:
    """Raise SettingsError unless the optional packages are installed."""
    missing = [package for module, package in _EXTRA.items() if find_spec(module) is None]
    if missing:
        raise SettingsError(
            f"card serve needs packages that are not installed: {', '.join(missing)}; run {install_command('serve')}"
        )


def _server(module: str, words: str = "") -> Any:
    """Return a module of the server; other commands must not load its optional packages."""
    return load(f"card.server.{module}", words, logger.info)


# ---- draft servers ---------------------------------------------------------------------------------------------------


@command(short_help="Draft for targets on other machines.")
@click.option("--listen", default="tcp://127.0.0.1:5555", show_default=True, help="Address; port 0 takes a free one.")
@option("--draft", section="Models", default=DEMO_DRAFT, show_default=True, help="Draft model.")
@click.option("--keys", type=NamedPath(path_type=Path), help="The server's folder of `card keys`.")
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "device", is_filled=True, help="cpu, cuda, cuda:1.")
@counted("--threads", default=1, words="CPU threads.", section="Machine")
@option("--cores", section="Machine", callback=parse_cores, help="CPU cores, such as 0 or 0,1.")
@counted("--max-model-len", default=4096, least=2, words="Longest text drafted for.", section="Models")
@option_of(EngineSettings, "kv_cache_memory", help="Memory for KV rows, such as 2GiB.  [default: by free memory]")
@counted("--max-sessions", default=16, words="Most clients.")
@counted("--max-sessions-per-client", words="Most per key.  [default: half]")
def draft_server(**options: Any) -> int:
    """Load a draft model and draft for every target that connects, until interrupted.

    Prints one line with the address when it is ready. Targets use it with --draft-address.
    """
    return run("card.cli.draft_server.run", **options)


@command(short_help="Make the keys of a draft server and its clients.")
@click.argument("folder", metavar="DIR", type=NamedPath(path_type=Path, file_okay=False))
@click.option("--client", "clients", multiple=True, help="Name of a client; may be given several times.")
def keys(folder: Path, clients: tuple[str, ...]) -> None:
    """Make DIR/server for the machine of `card draft-server`, and DIR/client (or DIR/NAME) for each client's machine.

    With --client, an existing server keeps its keys; it accepts the new clients after a restart. Nothing is
    overwritten.
    """
    for path in load("card.links.keys", "").make_keys(folder, clients):
        click.echo(f"{path}")
