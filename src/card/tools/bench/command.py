"""`card bench`: methods, pairs and data sets against each other in one run, interleaved, texts compared first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from card.cli.parts.files import check_can_write, writing
from card.cli.parts.interrupts import INTERRUPTED
from card.cli.parts.options import DEMO_DRAFT, DEMO_TARGET, given
from card.cli.parts.remarks import hint_at_int8
from card.cli.parts.starting import Say
from card.cli.parts.tables import show
from card.config import DraftSettings, SamplingParams, parse_parameter_count
from card.config.fields import declared, require
from card.config.registry import settings_of_methods
from card.config.splitting import engine_settings
from card.engine.trace import Trace, write_trace
from card.errors import BenchError, CardError, SettingsError, named
from card.tools.bench.datasets import DataSpec, parse_spec, read_datasets
from card.tools.bench.environment import choose_cores, describe_run
from card.tools.bench.lineup import BenchPlan, Lineup, LineupSettings, PairSpec, make_plan
from card.tools.bench.records import Run, busy_load
from card.tools.bench.results import read_unchecked
from card.tools.bench.row_names import DEFAULT_ROWS, DRAFT_OPTIONS, ROWS_ALONE, names_of, settings_read, uncoupled
from card.tools.bench.runner import run_bench
from card.tools.bench.tables import SPARE, rich_tables


def run(**options: Any) -> int:
    """Run `card bench`."""
    out, resume, trace_file = options.pop("out"), options.pop("resume"), options.pop("trace")
    is_wide = options.pop("wide")
    console = Console(stderr=True)
    environment = describe_run()
    old: Run | None = None
    if resume is not None:
        if out is not None:
            raise SettingsError("--resume goes on in its own file; leave --out out")
        old, out = read_unchecked(resume), resume
        if old.status == "complete":
            click.echo(f"{resume}: the run is complete, nothing is missing", err=True)
        options = _resumed_options(click.get_current_context(), options, old)
    out = out or Path(time.strftime("bench-%Y%m%d-%H%M%S.jsonl"))
    if out.suffix == ".gz":
        raise SettingsError(f"{out} would be packed, and a run appends to its file line by line; leave .gz out")
    check_can_write(out)
    plan = read_plan(options)
    plan = replace(plan, pairs={name: _hinting(open_pair) for name, open_pair in plan.pairs.items()})
    if load := busy_load(environment.machine):
        click.echo(f"the machine is busy: {load}; figures will be poor", err=True)
    size_before = out.stat().st_size if out.exists() else 0
    try:
        traces: dict[str, Trace] = {}
        done = run_bench(plan, environment, out, console, old, None if trace_file is None else traces)
    except CardError:
        if out.exists() and out.stat().st_size > size_before:
            click.echo(f"what was measured is in {out}; card bench --resume {out} goes on with it", err=True)
        raise
    if traces:
        with writing(trace_file) as place, place.open("w", encoding="utf-8") as file:
            write_trace(file, traces, {"command": environment.command, "commit": environment.commit})
    elif trace_file is not None:
        click.echo("nothing was decoded, so there is no trace", err=True)
    return _show(done, out, is_wide=is_wide)


def _hinting(open_pair: Callable[[Say], Lineup]) -> Callable[[Say], Lineup]:
    """Return a function that opens a pair and hints at integer weights where they would be faster."""

    def opened(say: Say) -> Lineup:
        lineup = open_pair(say)
        hint_at_int8(lineup.could_run_int8)
        return lineup

    return opened


def read_plan(options: dict[str, Any]) -> BenchPlan:
    """Return what to run. Raises: SettingsError for options that do not go together."""
    pairs = _pairs(options)
    rows = names_of(
        [*_names(_methods(options, pairs)), *(f"card+{writers.replace(',', '+')}" for writers in options["writers"])]
    )
    _refuse_unread(rows, options)
    if options["coupling_report"]:
        if options["temperature"] == 0:
            raise SettingsError("--coupling-report needs a temperature above 0, got 0; add --temperature 1")
        rows = uncoupled(rows)
    lengths = options["sps_lengths"]
    for one in lengths:
        allowed = declared(DraftSettings)["num_speculative_tokens"].fault(one)
        require(not allowed, "--sps-lengths", allowed, one)
    sampling = {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")}
    lineup = LineupSettings(
        params=SamplingParams(**sampling).resolved(),
        cores=choose_cores(options["cores"]),
        dtype=options["dtype"],
        lengths=tuple(lengths),
        max_model_len=options["max_model_len"],
        own={name: options[name] for name in settings_of_methods()},
        draft_vocab=options["draft_vocab"],
        draft=given({name: options[name] for name in DRAFT_OPTIONS}),
        forced_acceptance=options["force_acceptance"],
    )
    return make_plan(
        rows,
        pairs,
        lineup,
        read_datasets(_data(options), limit=None, is_raw=options["raw"]),
        repeats=options["repeats"],
        limit=options["limit"],
        skips_long=options["skip_long"],
        options=json.loads(json.dumps(options)),
    )


def _refuse_unread(rows: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise SettingsError for a setting of a method that no row reads."""
    read = frozenset().union(*map(settings_read, rows))
    for name in settings_of_methods():
        if name not in read and options[name] != engine_settings()[name].default:
            raise SettingsError(f"{named(name)} would do nothing: no row reads it; add one that does, or leave it out")


def _methods(options: dict[str, Any], pairs: Sequence[PairSpec]) -> str:
    """Return the rows asked for, or the default ones; say so if a pair has no draft model and hence fewer rows."""
    if options["methods"] is not None:
        return str(options["methods"])
    if all(pair.draft is not None for pair in pairs):
        return DEFAULT_ROWS
    click.echo(f"no draft model is given, so the rows are {ROWS_ALONE}; --methods names others", err=True)
    return ROWS_ALONE


def _names(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pairs(options: dict[str, Any]) -> list[PairSpec]:
    pairs = [(target, draft) for target, draft in options["pair"]]
    if not pairs or options["target"] or options["draft"]:
        target = options["target"] or DEMO_TARGET
        draft = options["draft"] or (DEMO_DRAFT if target == DEMO_TARGET else "none")
        pairs.insert(0, (target, draft))
    costs = [None if cost == "none" else cost for cost in options["target_cost"] or ["none"]]
    for cost in costs:
        if cost is not None:
            parse_parameter_count(cost)
    return [
        PairSpec(target=target, draft=None if draft == "none" else draft, target_cost=cost)
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


def _show(run: Run, out: Path, *, is_wide: bool) -> int:
    """Print the tables and where the lines are. Returns the exit status."""
    tables = rich_tables(run, is_wide=is_wide)
    for table in tables:
        show(Console(), table, spare=SPARE, is_wide=is_wide)
    if run.status == "interrupted":
        shown = "the tables hold what is complete" if tables else "no prompt is complete"
        click.echo(f"interrupted; {shown}. card bench --resume {out} goes on", err=True)
        return INTERRUPTED
    click.echo(f"results are in {out}", err=True)
    return 0
