"""The options of `card bench` and `card report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.files import NamedPath, OutputPath
from card.cli.parts.options import (
    DEMO_DRAFT,
    DEMO_TARGET,
    kernels_option,
    neutral_options,
    option_of,
    own_option,
    parse_cores,
    parse_numbers,
    wide_option,
    with_options,
)
from card.cli.parts.sections import option
from card.cli.parts.starting import run
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.config.registry import settings_of_methods
from card.tools.bench.row_names import DEFAULT_ROWS, DRAFT_OPTIONS, PRESETS, PUBLISHED, ROWS_ALONE, shipped

_OF_ROWS = "Of card-chain, card-tree, card-turns.  [default: the library's]"


@command(short_help="Measure methods against each other: speed, acceptance, same text.")
@option(
    "--methods",
    section="Method",
    help=f"Rows, or presets ({', '.join(PRESETS)}), with commas; card+beam,suffix is CARD with these writers.  "
    f"[default: {DEFAULT_ROWS}; {ROWS_ALONE} if a pair has no draft model]",
)
@option("--writers", section="Method", multiple=True, help="One more row: CARD with these writers.")
@click.option(
    "--data",
    multiple=True,
    help=f"Shipped prompts ({', '.join(shipped())}), or a published set ({', '.join(PUBLISHED)}) "
    "as gsm8k=FILE or hub:gsm8k; may be given several times.  [default: questions]",
)
@click.option("--from-hub", is_flag=True, help="Fetch published sets.")
@click.option("--prompts", multiple=True, help="JSON lines with a question each: FILE or NAME=FILE.")
@click.option("--raw", is_flag=True, help="Use no chat template.")
@click.option("--limit", type=int, default=8, show_default=True, help="Prompts of each data set.")
@click.option("--skip-long", is_flag=True, help="Leave out prompts too long.")
@option_of(EngineSettings, "target")
@option("--draft", section="Models", help=f"Draft model, or none.  [default: {DEMO_DRAFT} beside {DEMO_TARGET}]")
@option(
    "--pair",
    section="Models",
    nargs=2,
    multiple=True,
    metavar="TARGET DRAFT",
    help="A pair; may be given several times.",
)
@option(
    "--target-cost",
    section="Models",
    is_common=False,
    multiple=True,
    help="Price of the target, such as 300M, or none; several make several pairs.  [default: none]",
)
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "max_model_len")
@option_of(SamplingParams, "max_tokens", default=128)
@click.option("--repeats", type=int, default=5, show_default=True, help="Runs of each prompt and row.")
@neutral_options
@option_of(SamplingParams, "seed", default=0)
@option(
    "--cores",
    section="Machine",
    is_common=False,
    callback=parse_cores,
    help="Cores, the last one the drafter's.  [default: first and last]",
)
@option(
    "--sps-lengths",
    section="Drafting",
    is_common=False,
    callback=parse_numbers,
    default="2,3,4,5,6,8,10,12",
    show_default=True,
    help="Draft lengths of sps, ouroboros, card-turns, transformers-assisted.",
)
@option_of(EngineSettings, "draft_vocab")
@with_options(*(own_option(name, is_filled=True) for name in settings_of_methods()))
@wide_option
@with_options(*(option_of(DraftSettings, name, help=_OF_ROWS) for name in DRAFT_OPTIONS))
@option("--coupling-report", section="Drafting", is_common=False, is_flag=True, help="Add rows without coupled noise.")
@click.option("--force-acceptance", type=click.FloatRange(0, 1), help="Accept by chance; not exact.")
@click.option("--trace", type=OutputPath(), help="Trace for ui.perfetto.dev.")
@click.option(
    "--out", type=OutputPath(is_read=True), help="JSON lines are appended to it.  [default: bench-DATE-TIME.jsonl]"
)
@click.option("--resume", type=NamedPath(path_type=Path), help="Run what this file lacks.")
def bench(**options: Any) -> int:
    """Measure methods against each other on the same weights, prompts and cores.

    All rows decode a prompt before the next one comes. Texts are compared before any time is shown. Ctrl-C keeps what
    is done.
    """
    return run("card.tools.bench.command.run", **options)


@command(short_help="Make a page and a table of bench files.")
@click.argument("results", nargs=-1, required=True, type=NamedPath(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=OutputPath(), help="Write one HTML file that needs nothing else.")
@click.option("--csv", "csv_path", type=OutputPath(), help="Write a line for each pair, row and workload.")
def report(**options: Any) -> int:
    """Read RESULTS, the files of card bench, check that their texts are those of plain decoding, and draw them."""
    return run("card.tools.bench.report.command.run", "reading", **options)
