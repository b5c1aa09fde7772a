"""`card bench`: methods, pairs and data sets against each other in one run, interleaved, texts compared first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from transformers.utils import logging as transformers_logging

from card.bench.datasets import PUBLISHED, DataSpec, parse_spec, read_datasets, shipped
from card.bench.environment import Environment, choose_cores, describe_run
from card.bench.lineup import DRAFT_OPTIONS, PRESETS, LineupSettings, PairSpec, make_plan, names_of, uncoupled
from card.bench.records import Run
from card.bench.results import read_unchecked
from card.bench.runner import Plan, run_bench
from card.bench.tables import rich_tables
from card.cli.options import DEMO_DRAFT, DEMO_TARGET, given, parse_cores, parse_numbers
from card.cli.outputs import OutputFile, check_can_write
from card.config import SamplingParams
from card.errors import BenchError, CardError, SettingsError
from card.trace import Trace, write_trace

_INTERRUPTED = 130
_BUSY_SHARE = 0.5  # of the cores: a load above it makes poor figures

F = TypeVar("F", bound=Callable[..., Any])


def _draft_options(command: F) -> F:
    for name, kind in reversed(list(DRAFT_OPTIONS.items())):
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, type=kind, help="Of card-chain, card-tree, card-turns.  [default: the library's]")(
            command
        )
    return command


@click.command(short_help="Measure methods against each other: speed, acceptance, same text.")
@click.option(
    "--methods",
    default="vanilla,sps,card",
    show_default=True,
    help=f"Rows, or presets ({', '.join(PRESETS)}), with commas; card+beam,suffix is CARD with these writers. Plain "
    "decoding on all cores is always there, and so is the twin on all cores of a row on one.",
)
@click.option("--writers", multiple=True, help="One more row: CARD with these writers, such as beam,suffix.")
@click.option(
    "--data",
    multiple=True,
    help=f"What to decode, may be given several times: shipped prompts ({', '.join(shipped())}), a published set from "
    f"its file such as gsm8k=FILE ({', '.join(PUBLISHED)}) or from the hub such as hub:gsm8k.  [default: questions]",
)
@click.option("--from-hub", is_flag=True, help="Fetch the published sets of --data that come without a file.")
@click.option("--prompts", multiple=True, help="JSON lines with a question each: FILE or NAME=FILE.")
@click.option("--raw", is_flag=True, help="Continue all prompts as they are, without the chat template.")
@click.option("--limit", type=int, default=8, show_default=True, help="Prompts of each data set.")
@click.option("--skip-long", is_flag=True, help="Leave out prompts that do not fit into the context.")
@click.option("--target", help=f"Target model: a folder, a hub name, or {DEMO_TARGET}.  [default: {DEMO_TARGET}]")
@click.option("--draft", help=f"Draft model, or none.  [default: {DEMO_DRAFT} beside {DEMO_TARGET}]")
@click.option("--pair", nargs=2, multiple=True, metavar="TARGET DRAFT", help="A pair; may be given several times.")
@click.option(
    "--target-cost",
    multiple=True,
    help="Price of the target, such as 300M, or none for as it is; several make several pairs.  [default: none]",
)
@click.option("--dtype", default="auto", show_default=True, help="auto (as stored), float32, bfloat16, float16.")
@click.option(
    "--max-model-len", type=int, help="Most tokens of prompt and answer.  [default: the model's, at most 4096]"
)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most new tokens of an answer.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Runs of each prompt and row.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens up to this mass.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the best.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same text.")
@click.option("--cores", callback=parse_cores, help="Cores, the last one the drafter's.  [default: first and last]")
@click.option(
    "--sps-lengths",
    callback=parse_numbers,
    default="2,3,4,5,6,8,10,12",
    show_default=True,
    help="Draft lengths that sps, ouroboros, card-turns and transformers-assisted choose from.",
)
@click.option("--hrad", default="auto", show_default=True, help="Predictor of specbranch: a file, off, or auto.")
@_draft_options
@click.option("--coupling-report", is_flag=True, help="Add rows that rank candidates without the sampling noise.")
@click.option(
    "--trace",
    type=OutputFile(),
    help="Decode the first prompt of each data set once more and write what happened when, for ui.perfetto.dev.",
)
@click.option("--out", type=Path, help="JSON lines are appended to it.  [default: bench-DATE-TIME.jsonl]")
@click.option("--resume", type=Path, help="Go on with the last run of this file: exactly what is missing.")
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> int:
    """Measure methods against each other on the same weights, prompts and cores.

    All rows decode a prompt before the next one comes. Texts are compared before any time is shown. Ctrl-C keeps what
    is done.
    """
    out, resume, trace_file = options.pop("out"), options.pop("resume"), options.pop("trace")
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    console = Console(stderr=True)
    environment = describe_run()
    old: Run | None = None
    if resume is not None:
        if out is not None:
            raise SettingsError("--resume goes on in its own file; leave --out out")
        old, out = read_unchecked(resume), resume
        if old.status == "complete":
            console.print(f"{resume}: the run is complete, nothing is missing", highlight=False, soft_wrap=True)
        options = _resumed_options(context, options, old)
    out = out or Path(time.strftime("bench-%Y%m%d-%H%M%S.jsonl"))
    check_can_write(out)
    plan = _plan(options)
    _warn_if_busy(environment, console)
    size_before = out.stat().st_size if out.exists() else 0
    try:
        traces: dict[str, Trace] = {}
        run = run_bench(plan, environment, out, console, old, None if trace_file is None else traces)
    except CardError:
        if out.exists() and out.stat().st_size > size_before:
            console.print(
                f"what was measured is in {out}; card bench --resume {out} goes on with it",
                highlight=False,
                soft_wrap=True,
            )
        raise
    if traces:
        write_trace(trace_file, traces, {"command": environment.command, "commit": environment.commit})
    elif trace_file is not None:
        console.print("nothing was decoded, so there is no trace", highlight=False)
    return _show(run, out, console)


def _plan(options: dict[str, Any]) -> Plan:
    """Return what the options ask for. Raises: CardError."""
    rows = names_of(
        [*_names(options["methods"]), *(f"card+{writers.replace(',', '+')}" for writers in options["writers"])]
    )
    if options["coupling_report"]:
        if options["temperature"] == 0:
            raise SettingsError("--coupling-report needs a temperature above 0, got 0; add --temperature 1")
        rows = uncoupled(rows)
    lengths = options["sps_lengths"]
    if min(lengths) < 1:
        raise SettingsError(f"--sps-lengths must be 1 or more, got {min(lengths)}")
    sampling = {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")}
    lineup = LineupSettings(
        params=SamplingParams(**sampling),
        cores=choose_cores(options["cores"]),
        dtype=options["dtype"],
        lengths=tuple(lengths),
        max_model_len=options["max_model_len"],
        hrad=options["hrad"],
        draft=given({name: options[name] for name in DRAFT_OPTIONS}),
    )
    return make_plan(
        rows,
        _pairs(options),
        lineup,
        read_datasets(_data(options), limit=None, is_raw=options["raw"]),
        repeats=options["repeats"],
        limit=options["limit"],
        skips_long=options["skip_long"],
        options=json.loads(json.dumps(options)),
    )


def _names(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pairs(options: dict[str, Any]) -> list[PairSpec]:
    """Return each pair at each price."""
    pairs = [(target, draft) for target, draft in options["pair"]]
    if not pairs or options["target"] or options["draft"]:
        target = options["target"] or DEMO_TARGET
        draft = options["draft"] or (DEMO_DRAFT if target == DEMO_TARGET else "none")
        pairs.insert(0, (target, draft))
    costs = options["target_cost"] or ["none"]
    return [
        PairSpec(
            target=target,
            draft=None if draft == "none" else draft,
            target_cost=None if cost == "none" else cost,
        )
        for cost in costs
        for target, draft in pairs
    ]


def _data(options: dict[str, Any]) -> list[DataSpec]:
    """Return the data sets, those of ``--prompts`` last; the shipped questions if there are none."""
    asked = [name for text in options["data"] for name in ([text] if "=" in text else _names(text))]
    specs = [parse_spec(text, from_hub=options["from_hub"]) for text in asked]
    for text in options["prompts"]:
        name, is_named, path = text.partition("=")
        specs.append(DataSpec(name if is_named else Path(text).stem, "prompts", path if is_named else text))
    return specs or [parse_spec("questions")]


def _resumed_options(context: click.Context, options: dict[str, Any], old: Run) -> dict[str, Any]:
    """Return the options of an earlier run. Raises: BenchError if the user gives one another value now."""
    if not old.options:
        raise BenchError(f"run {old.run_id} does not say what it was asked for, so that it cannot go on")
    for name, value in json.loads(json.dumps(options)).items():
        is_given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if is_given and value != old.options.get(name):
            flag = "--" + name.replace("_", "-")
            raise BenchError(f"{flag} was {old.options.get(name)!r} in that run and is {value!r} now; leave it out")
    return {**options, **old.options}


def _warn_if_busy(environment: Environment, console: Console) -> None:
    load, cores = environment.machine["load_average"], environment.machine["cores"]
    if load > _BUSY_SHARE * cores:
        console.print(
            f"the machine is busy: load {load} on {cores} cores; figures will be poor", highlight=False, soft_wrap=True
        )


def _show(run: Run, out: Path, console: Console) -> int:
    """Print the tables and where the lines are. Returns the exit status."""
    tables = rich_tables(run)
    for table in tables:
        Console().print(table)
    if run.status == "interrupted":
        shown = "the tables hold what is complete" if tables else "no prompt is complete"
        console.print(f"interrupted; {shown}. card bench --resume {out} goes on", highlight=False, soft_wrap=True)
        return _INTERRUPTED
    console.print(f"results are in {out}", highlight=False, soft_wrap=True)
    return 0
