"""Options that several commands share, and the objects made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, get_args

import click

from card.cli.ahead import start_drafter_child
from card.cli.lazy import load
from card.cli.progress import spinner
from card.config import Grammar, Growth, Placement, SamplingParams, VerifyShape
from card.errors import SettingsError
from card.methods import METHODS, find_method
from card.models.places import local_model
from card.writers.local import writer_names

if TYPE_CHECKING:  # loaded when a command runs
    from card.api.llm import LLM

F = TypeVar("F", bound=Callable[..., Any])
DEMO_TARGET, DEMO_DRAFT = "demo-target", "demo-draft"
LEAST_CHECKED_TOKENS = 8  # per prompt of card check-pair: fewer give no rate worth the name


def parse_numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return numbers from "4,3,2"; raises click's BadParameter."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"must be whole numbers such as 3 or 4,3,2, got {value!r}") from None


def parse_fractions(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    """Return numbers from "0,0.5,20"; raises click's BadParameter."""
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"must be numbers such as 0 or 0,5,20, got {value!r}") from None


def parse_cores(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return core numbers from "0,1"; raises click's BadParameter."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"must be core numbers such as 0 or 0,1, got {value!r}") from None


def parse_biases(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """Return biases by token from "5=-100" and the like; raises click's BadParameter."""
    biases: dict[int, float] = {}
    for value in values:
        token_id, bias = value.partition("=")[::2]
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"must be a token id and a number such as 5=-100, got {value!r}") from None
    return biases


_MODEL_OPTIONS = [
    click.option(
        "--target",
        help=f"Target model: a folder, a GGUF file, a hub name, or {DEMO_TARGET}.  [default: {DEMO_TARGET}]",
    ),
    click.option(
        "--draft",
        help=f"Draft model: a folder, a GGUF file, a hub name, or {DEMO_DRAFT}, the default beside {DEMO_TARGET}.",
    ),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        help="auto (as stored), int8, float32, bfloat16, float16, float64.",
    ),
    click.option("--draft-dtype", help="The same for the draft model.  [default: the target's]"),
    click.option(
        "--draft-vocab",
        type=int,
        help="The draft model proposes the first so many tokens and special ones only: less work in its head, same "
        "text.  [default: all]",
    ),
    click.option("--device", default="cpu", show_default=True, help="Device of the target: cpu, cuda, cuda:1."),
    click.option("--draft-device", help="Device of the draft model.  [default: the target's]"),
    click.option(
        "--target-cost", help="Inflate the target to the price of so many parameters, such as 300M; same outputs."
    ),
    click.option(
        "--max-model-len", type=int, help="Most tokens of prompt and answer.  [default: the model's, at most 4096]"
    ),
    click.option("--max-num-seqs", type=int, help="Most requests that run at once; others wait.  [default: 16]"),
    click.option("--kv-cache-memory", help="Most memory for the target's KV, such as 2GiB.  [default: by the RAM]"),
    click.option("--prefill-chunk", type=int, help="Most prompt tokens in a pass that also decodes.  [default: 64]"),
    click.option("--threads", type=int, help="CPU threads of the target.  [default: as many as do not slow it down]"),
    click.option("--draft-threads", type=int, default=1, show_default=True, help="CPU threads of the drafter."),
    click.option("--cores", callback=parse_cores, help="CPU cores of the target, such as 0 or 0,1."),
    click.option("--draft-cores", callback=parse_cores, help="CPU cores of the drafter."),
    click.option(
        "--wait-for-drafter/--no-wait-for-drafter",
        default=None,
        help="Begin once the drafter is up, or at once.  [default: at once under --policy auto]",
    ),
    click.option(
        "--cache/--no-cache",
        default=None,
        help="Keep measured latencies and converted weights for the next start.  [default: --cache]",
    ),
    click.option("--cache-dir", help="Folder for what is kept between starts.  [default: ~/.cache/card]"),
    click.option("--drafter-timeout-s", type=float, help="Silence after which the drafter is replaced, in seconds."),
]


def parse_names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the names in "a,b"."""
    return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def _complete_method(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    return [name for name in METHODS if name.startswith(begun)]


_METHOD_OPTIONS = [
    click.option(
        "--method",
        default="card",
        show_default=True,
        shell_complete=_complete_method,
        help=f"One of {', '.join(METHODS)}.",
    ),
    click.option(
        "--placement", help=f"Where the drafter runs: {', '.join(get_args(Placement))}.  [default: by method]"
    ),
    click.option(
        "--schedule",
        help="Drafter beside the target, turns taken on all cores, or auto: what is faster here.  [default: auto]",
    ),
    click.option(
        "--policy", help="Tune what you did not set, by measurement (auto), or nothing (fixed).  [default: auto]"
    ),
    click.option(
        "--writers",
        callback=parse_names,
        help=f"Who proposes candidates, such as beam,suffix: beam (the draft model), {', '.join(writer_names())}.  "
        "[default: by method]",
    ),
    click.option("--second-draft", help="Another draft model, whose candidates join those of the first."),
    click.option("--hrad", help="Predictor for specbranch: a file of card train hrad, off, or auto.  [default: auto]"),
    click.option("--suffix-store", help="File in which the writer store keeps finished texts for later requests."),
    click.option("--suffix-store-key", help="Texts under another key are neither read nor counted."),
    click.option("--suffix-store-tokens", type=int, help="Most tokens kept under a key; the oldest texts go first."),
    click.option("--draft-address", help="Use the draft server at tcp://host:port instead of a drafter of one's own."),
    click.option(
        "--draft-optional/--draft-required",
        default=None,
        help="Decode plainly while no draft server answers at --draft-address, or end at once.  [default: required]",
    ),
    click.option("--draft-keys", help="Folder with the keys for a draft server, as made by card keys."),
]
_DRAFT_OPTIONS = [
    click.option("--verify", help=f"Shape that the target verifies: {' or '.join(get_args(VerifyShape))}."),
    click.option("--beam-width", type=int, help="Most candidates made in one drafter pass."),
    click.option("--branch", type=int, help="Most continuations kept of one candidate."),
    click.option("--budget", type=int, help="Most candidates verified in one target pass."),
    click.option("--min-verify-prob", type=float, help="A candidate whose path is less likely is not verified."),
    click.option("--lead", type=int, help="Most layers of candidates ahead of the text."),
    click.option(
        "--num-speculative-tokens", type=int, help="Tokens drafted per turn where drafter and target take turns."
    ),
    click.option(
        "--coupled-noise/--no-coupled-noise", default=None, help="Rank candidates with the target's sampling noise."
    ),
    click.option("--max-wait-s", type=float, help="Longest wait for candidates when there are fewer than --min-depth."),
    click.option("--min-depth", type=int, help="Length of the best path below which the target waits, if it may."),
    click.option(
        "--waits-after-miss/--no-waits-after-miss",
        default=None,
        help="Whether a round after a miss waits like others, or runs the last token at once.",
    ),
    click.option("--growth", help=f"How the tree of candidates grows: {', '.join(get_args(Growth))}."),
    click.option("--branch-below", type=float, help="Probability below which growth branch takes alternatives."),
    click.option(
        "--fan-out",
        callback=parse_numbers,
        help="Outcomes that growth fan-out prepares at each position, such as 4,3,2; the last one repeats.",
    ),
]
_SAMPLING_OPTIONS = [
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Most new tokens."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token."),
    click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k most likely tokens; 0 keeps all."),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens up to this mass."
    ),
    click.option(
        "--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the best one."
    ),
    click.option("--seed", type=int, help="Same seed, same text.  [default: drawn]"),
    click.option("--stop", multiple=True, help="End before this string; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the model's end tokens."),
]
_SHAPING_OPTIONS = [
    click.option(
        "--min-tokens", type=int, default=0, show_default=True, help="New tokens before the text may end by itself."
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=0.0,
        show_default=True,
        help="Off tokens that the answer has, -2 to 2.",
    ),
    click.option(
        "--frequency-penalty", type=float, default=0.0, show_default=True, help="The same, as often as it has them."
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        show_default=True,
        help="Above 1: less of what prompt or answer have already.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=parse_biases,
        metavar="ID=VALUE",
        help="Add VALUE, -100 to 100, to the logit of this token; may be given several times.",
    ),
    click.option("--json-object", is_flag=True, help="Answer with a JSON object."),
    click.option(
        "--json-schema", type=click.File("r", encoding="utf-8"), help="Answer with JSON of the schema in this file."
    ),
    click.option("--regex", help="Answer with a text that this regular expression matches as a whole."),
    click.option("--speculation/--no-speculation", default=True, help="Whether candidates are verified at all."),
]


def wide_option(command: F) -> F:
    """Add --wide."""
    return click.option("--wide", is_flag=True, help="Show all columns of the tables, however wide they get.")(command)


def model_options(command: F) -> F:
    """Add the options that say which models run where."""
    return _with(_MODEL_OPTIONS, command)


def method_options(command: F) -> F:
    """Add the options that choose the method."""
    return _with(_METHOD_OPTIONS, command)


def draft_options(command: F) -> F:
    """Add the options that shape drafting."""
    return _with(_DRAFT_OPTIONS, command)


def sampling_options(command: F) -> F:
    """Add the options that shape the text."""
    return _with(_SAMPLING_OPTIONS, command)


def shaping_options(command: F) -> F:
    """Add the options that look at the text so far: penalties, biases, grammars."""
    return _with(_SHAPING_OPTIONS, command)


def take_sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Take the sampling options out of ``options``. Raises: SettingsError for a value out of range."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
    more = ("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    values = {name: options.pop(name) for name in (*names, *more) if name in options}
    return SamplingParams(**values, grammar=_take_grammar(options), speculates=options.pop("speculation", True))


def _take_grammar(options: dict[str, Any]) -> Grammar | None:
    """Take the options that say what the text must look like. Raises: SettingsError for more than one."""
    is_object, schema, regex = (options.pop(name, None) for name in ("json_object", "json_schema", "regex"))
    if bool(is_object) + (schema is not None) + (regex is not None) > 1:
        raise SettingsError("--json-object, --json-schema and --regex exclude each other; give one of them")
    if schema is not None:
        return Grammar("json_schema", _text_of(schema))
    if regex is not None:
        return Grammar("regex", regex)
    return Grammar("json_object") if is_object else None


def _text_of(file: TextIO) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file.name} is not valid UTF-8: {error}; convert it first") from error


def resolve_models(options: dict[str, Any], *, needs_draft: bool) -> tuple[str, str | None]:
    """Take target and draft out of ``options``; the built-in draft stands beside the built-in target.

    Raises: ModelError for a path that is no model, the target's first; SettingsError if the draft is missing.
    """
    target, draft = options.pop("target") or DEMO_TARGET, options.pop("draft")
    local_model(target)
    if draft is None and target == DEMO_TARGET:
        draft = DEMO_DRAFT
    if draft is None and needs_draft:
        raise SettingsError("this method needs a draft model: give --draft, or --method vanilla to do without")
    if draft is not None and needs_draft:
        local_model(draft)
    return target, draft


def demo_note(target: str) -> str:
    """Return what must be known of the answers of the demo target; nothing of other models."""
    return f"{DEMO_TARGET} is a small model for trying things out: it is often wrong." if target == DEMO_TARGET else ""


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave a value; the rest keep the defaults of the settings."""
    return {name: value for name, value in options.items() if value is not None}


def make_llm(options: dict[str, Any]) -> LLM:
    """Load what the options ask for; spin meanwhile. Raises: CardError of any kind."""
    method = options.pop("method")
    needs_draft = find_method(method).needs_draft and options.get("draft_address") is None
    target, draft = resolve_models(options, needs_draft=needs_draft)
    draft = draft if needs_draft else None
    spare = start_drafter_child(method, draft, options)
    make: type[LLM] = load("card.api.llm").LLM
    with spinner(f"loading {target}") as say:
        return make(target, draft, method=method, spare=spare, say=say, **given(options))


def _with(options: Sequence[Callable[[F], F]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
