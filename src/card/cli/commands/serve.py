"""`card serve`: the model behind an HTTP server in OpenAI's shape."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from card.cli.ahead import start_drafter_child
from card.cli.help import command
from card.cli.lazy import load
from card.cli.options import draft_options, given, method_options, model_options, resolve_models
from card.cli.progress import spinner
from card.errors import SettingsError
from card.methods import find_method

if TYPE_CHECKING:
    from card.api.async_llm import AsyncLLM

_EXTRA = {
    "fastapi": "fastapi",
    "prometheus_client": "prometheus_client",
    "pydantic": "pydantic",
    "uvicorn": "uvicorn",
    "yaml": "PyYAML",
}
_PREFIX = "CARD"  # of the environment's names: CARD_MAX_NUM_SEQS is --max-num-seqs
_ALIASES = {"draft_model": "draft", "model": "target"}  # other spellings of an option of all commands
_SERVER_OPTIONS = {  # option -> field of ServerSettings
    "host": "host",
    "port": "port",
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "no_key": "no_key",
    "allowed_host": "allowed_hosts",
    "cors_origin": "cors_origins",
    "max_num_queued_reqs": "max_num_queued_reqs",
    "max_request_bytes": "max_request_bytes",
    "max_request_tokens": "max_request_tokens",
    "max_connections": "max_connections",
    "head_timeout": "head_timeout_s",
    "body_timeout": "body_timeout_s",
    "grammar_timeout": "grammar_timeout_s",
    "request_timeout": "request_timeout_s",
    "stall_timeout": "stall_timeout_s",
    "shutdown_timeout": "shutdown_timeout_s",
    "generation_config": "generation_config",
    "per_request_spec_decode_metrics": "spec_metrics",
    "tool_parser": "tool_parser",
    "log_level": "log_level",
}


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Let the file's values stand in for options that neither the command line nor the environment gives."""
    if path is None:
        return
    _require_extra()
    options = {p.name: p for p in context.command.params if isinstance(p, click.Option) and p.name and p.expose_value}
    known = {name.replace("-", "_") for p in options.values() for flag in p.opts for name in [flag.lstrip("-")]}
    settings = _server("config").read_config_file(path, known)
    by_flag = {flag.lstrip("-").replace("-", "_"): p for p in options.values() for flag in p.opts}
    defaults: dict[str, Any] = {}
    for name, value in settings.items():
        option = by_flag[name]
        assert option.name is not None
        if isinstance(value, tuple) and not option.multiple:
            value = ",".join(map(str, value))  # noqa: PLW2901
        elif option.multiple and not isinstance(value, tuple):
            value = (value,)  # noqa: PLW2901
        defaults[option.name] = value
    context.default_map = {**(context.default_map or {}), **defaults}


_OPTIONS = [
    click.option(
        "--config",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="YAML file with these options' names; the command line and CARD_* variables come first.",
    ),
    click.option("--host", help="Address to listen on.  [default: 127.0.0.1, this machine only]"),
    click.option("--port", type=int, help="Port; 0 takes a free one.  [default: 8000]"),
    click.option("--model", help="Same as MODEL and --target."),
    click.option(
        "--draft-model", "--model-draft", "--speculative-model", help="Same as --draft: the model that proposes."
    ),
    click.option(
        "--served-model-name",
        "--alias",
        multiple=True,
        help="Name that clients use; may be given several times.  [default: MODEL as given]",
    ),
    click.option(
        "--api-key",
        multiple=True,
        help="Key that clients must send, one of those given; better in CARD_API_KEY, where no process list shows it.",
    ),
    click.option(
        "--no-key",
        is_flag=True,
        default=None,
        help="Let everyone in who reaches the address, also from other machines.",
    ),
    click.option(
        "--allowed-host",
        multiple=True,
        metavar="NAME",
        help="Name under which the server may be asked; may be given several times, * allows all.  "
        "[default: localhost, loopback addresses, the address of --host]",
    ),
    click.option(
        "--cors-origin",
        multiple=True,
        metavar="ORIGIN",
        help="Origin whose web pages may ask, such as https://app.example; may be given several times, * allows all.",
    ),
    click.option(
        "--max-num-queued-reqs",
        "--max-queued-requests",
        type=int,
        help="Most requests that wait besides those that run; more get status 429.  [default: 256]",
    ),
    click.option("--max-request-bytes", type=int, help="Largest body of a request.  [default: 4194304]"),
    click.option("--max-request-tokens", type=int, help="Most new tokens of a request.  [default: the context]"),
    click.option("--max-connections", type=int, help="Most connections at once, idle ones too.  [default: 1024]"),
    click.option("--head-timeout", type=float, help="Seconds for a request's headers to arrive.  [default: 10]"),
    click.option(
        "--body-timeout",
        type=float,
        help="Seconds for a request's body to arrive, and for a client to take what it is sent.  [default: 60]",
    ),
    click.option("--grammar-timeout", type=float, help="Seconds for a schema to be compiled.  [default: 10]"),
    click.option("--request-timeout", type=float, help="Longest time of a request, in seconds.  [default: 600]"),
    click.option(
        "--stall-timeout", type=float, help="Seconds without progress after which it is not ready.  [default: 30]"
    ),
    click.option(
        "--shutdown-timeout",
        type=float,
        help="Seconds that running requests have left after SIGTERM or Ctrl-C.  [default: 30]",
    ),
    click.option(
        "--generation-config",
        type=click.Choice(["auto", "none"]),
        help="Default sampling parameters: the model's own, or neutral ones.  [default: auto]",
    ),
    click.option(
        "--per-request-spec-decode-metrics",
        type=click.Choice(["none", "summary"]),
        help="Tell in every answer how speculation did.  [default: none]",
    ),
    click.option(
        "--tool-parser",
        "--tool-call-parser",
        type=click.Choice(["auto", "hermes", "llama3", "mistral"]),
        help="How the model writes tool calls.  [default: auto, as its chat template says]",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="How much to log.  [default: info]",
    ),
]


@command(short_help="Serve a model over HTTP.", context_settings={"auto_envvar_prefix": _PREFIX})
@click.argument("model_argument", metavar="[MODEL]", required=False)
@method_options
@draft_options
@model_options
def serve(model_argument: str | None, **options: Any) -> None:
    """Serve MODEL (a folder, a GGUF file, a hub name, or demo-target) to clients of OpenAI's API, until interrupted.

    Every option may also be given as an environment variable (CARD_MAX_NUM_SEQS for --max-num-seqs) or in the file
    of --config; the command line comes first, then the environment, then the file.
    """
    _require_extra()
    settings_type = _server("config").ServerSettings
    changes = {name: options.pop(option) for option, name in _SERVER_OPTIONS.items()}
    for alias, name in _ALIASES.items():
        _take_alias(options, alias, name)
    if model_argument is not None:
        options["model_argument"] = model_argument
        _take_alias(options, "model_argument", "target")
    method = options.pop("method")
    needs_draft = find_method(method).needs_draft
    target, draft = resolve_models(options, needs_draft=needs_draft and options["draft_address"] is None)
    changes["served_model_names"] = changes["served_model_names"] or (target,)
    settings = settings_type(**{name: value for name, value in changes.items() if value not in (None, ())})
    _server("logs").set_up(settings.log_level)
    draft = draft if needs_draft and options["draft_address"] is None else None
    spare = start_drafter_child(method, draft, options)

    def make_llm() -> AsyncLLM:
        make: type[AsyncLLM] = load("card.api.async_llm").AsyncLLM
        with spinner(f"loading {target}") as say:
            return make(target, draft, method=method, spare=spare, say=say, **given(options))

    def announce(address: str) -> None:
        click.echo(f"card serve: {target} ready on {address}")

    status = _server("serving", "importing torch and transformers").serve(make_llm, settings, announce=announce)
    raise SystemExit(status)


for _option in reversed(_OPTIONS):
    serve = _option(serve)


def _take_alias(options: dict[str, Any], alias: str, name: str) -> None:
    """Move another spelling of an option to its own. Raises: SettingsError if both are given and differ."""
    value = options.pop(alias)
    if value is None:
        return
    if options[name] not in (None, value):
        raise SettingsError(f"{name} is given twice, as {options[name]!r} and as {value!r}; leave one out")
    options[name] = value


def _require_extra() -> None:
    """Raise SettingsError unless the optional packages are there."""
    missing = [package for module, package in _EXTRA.items() if find_spec(module) is None]
    if missing:
        raise SettingsError(
            f"card serve needs packages that are not installed: {', '.join(missing)}; run "
            "pip install 'card-decoding[serve]'"
        )


def _server(module: str, words: str = "") -> Any:
    """Return a module of the server, which stands on optional packages: other commands must not load it."""
    return load(f"card.server.{module}", words)
