"""The options of the commands that predict: profile, record and plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.files import NamedPath, OutputPath
from card.cli.parts.options import (
    MOST_RECORDED_TOKENS,
    counted,
    file_option,
    json_option,
    kernels_option,
    neutral_options,
    option_of,
    options_of,
    own_option,
    pair_options,
    parse_fractions,
    parse_names,
    parse_numbers,
    wide_option,
    with_options,
)
from card.cli.parts.refusals import ModeOption
from card.cli.parts.sections import option
from card.cli.parts.starting import run
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.tools.planner.requests import PoolRequest

# What reads an option of `card plan`.
_EDGE = ("edge", "edge_devices")
_POOL: dict[str, Any] = {"cls": ModeOption, "beside": ("pool",)}
_NO_EDGE: dict[str, Any] = {"cls": ModeOption, "apart_from": _EDGE}
_NO_POOL: dict[str, Any] = {"cls": ModeOption, "apart_from": ("pool", *_EDGE)}


def _parse_delays(context: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    delays: tuple[float, ...] | None = parse_fractions(context, param, value)
    if not all(0 <= delay < math.inf for delay in delays or ()):
        raise click.BadParameter(f"must be milliseconds of 0 or more such as 0,5,20, got {value!r}")
    return delays


@command(short_help="Measure what the passes of a model cost here.")
@click.argument("model")
@click.option("--out", type=OutputPath(), required=True, help="File to write, JSON.")
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "device", is_filled=True, help="cpu, cuda, cuda:1.")
@click.option(
    "--draft", help="Of MODEL: mtp or a head.", section="Models", cls=ModeOption, apart_from=("target_cost", "ctc")
)
@option("--target-cost", section="Models", help="Inflate the model to the price of 300M, say.")
@option("--threads", section="Machine", callback=parse_numbers, help="Such as 1,2.  [default: all, one fewer]")
@own_option("ctc")
@wide_option
def profile(**options: Any) -> int:
    """Measure what passes of MODEL cost, and the overheads around them.

    MODEL is a folder, a GGUF file, a hub name, demo-target or demo-draft.
    """
    return run("card.tools.planner.command.profile", **options)


@command(short_help="Record how a pair of models behaves, for plans.")
@click.option("--out", type=OutputPath(), required=True, help="File to write.")
@pair_options
@click.option("--data", multiple=True, default=("questions",), show_default=True, help="Prompts, as for card bench.")
@counted("--limit", words="Prompts of each data set.  [default: all]")
@click.option("--raw", is_flag=True, help="Use no chat template.")
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "device", is_filled=True)
@option_of(DraftSettings, "coupled_noise", is_filled=True, show_default=True)
@option("--methods", section="Method", callback=parse_names, help="Such as sparsespec.")
@own_option("ctc")
@own_option("kv_selection")
@option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS)
@neutral_options
@option_of(SamplingParams, "seed")
@option_of(SamplingParams, "stop", multiple=True)
@option_of(SamplingParams, "ignore_eos", is_filled=True)
def record(**options: Any) -> int:
    """Let the target answer prompts, and record the likely tokens of target and draft model at each position."""
    return run("card.tools.planner.command.record", **options)


@command(short_help="Predict the speed of every method from profiles and a recording.")
@option("--target", section="Models", required=True, help="Profile of the target: a file, or a shipped name.")
@option("--draft", section="Models", help="The draft model's.")
@click.option("--recording", type=NamedPath(dir_okay=False, path_type=Path), help="File of card record.")
@click.option("--synthetic", type=float, help="Instead: share of right first choices.")
@click.option(
    "--methods", callback=parse_names, help="Such as vanilla,sps,card.  [default: all]", section="Method", **_NO_POOL
)
@click.option(
    "--cores",
    type=int,
    help="CPU threads of both models.  [default: as profiled]",
    section="Machine",
    is_common=False,
    **_NO_EDGE,
)
@click.option(
    "--draft-threads",
    type=int,
    default=1,
    show_default=True,
    help="Of a drafter's process.",
    section="Machine",
    is_common=False,
    **_NO_EDGE,
)
@click.option(
    "--network-ms",
    type=click.FloatRange(0),
    help="One-way delay of a draft server.",
    cls=ModeOption,
    apart_from=("pool",),
)
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests at once.", **_NO_POOL)
@click.option("--search/--no-search", default=True, show_default=True, help="Look for the best settings.", **_NO_POOL)
@click.option("--pool", is_flag=True, help="How many targets can a drafter serve?")
@option_of(PoolRequest, "method", is_filled=True, **_POOL)
@click.option(
    "--delays-ms",
    default="0,5,20",
    show_default=True,
    callback=_parse_delays,
    help="Pool: delays of the network.",
    **_POOL,
)
@option_of(PoolRequest, "loads", callback=parse_fractions, **_POOL)
@with_options(*options_of(PoolRequest, "min_speed_up max_targets", **_POOL))
@file_option("--edge", words="Plan this edge.")
@counted("--edge-devices", words="Or draw this many devices.")
@click.option("--edge-place", help="Drawn: even or narrow.  [default: even]", cls=ModeOption, beside=("edge_devices",))
@file_option("--edge-bench", words="Edge: lines of card bench.", cls=ModeOption, beside=("edge_devices", "edge"))
@json_option
@wide_option
def plan(**options: Any) -> int:
    """Predict speeds, settings and where time goes: the engine runs in virtual time on what was recorded."""
    return run("card.tools.planner.command.plan", **options)
