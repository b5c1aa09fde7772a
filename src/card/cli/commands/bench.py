"""The options of `card bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.bench.names import DRAFT_OPTIONS, PRESETS, PUBLISHED, shipped
from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import (
    DEMO_DRAFT,
    DEMO_TARGET,
    option_of,
    options_of,
    parse_cores,
    parse_numbers,
    wide_option,
    with_options,
)
from card.cli.outputs import OutputFile
from card.config import DraftSettings, EngineSettings, SamplingParams

_OF_ROWS = "Of card-chain, card-tree, card-turns.  [default: the library's]"


@command(short_help="Measure methods against each other: speed, acceptance, same text.")
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
@option_of(EngineSettings, "target")
@click.option("--draft", help=f"Draft model, or none.  [default: {DEMO_DRAFT} beside {DEMO_TARGET}]")
@click.option("--pair", nargs=2, multiple=True, metavar="TARGET DRAFT", help="A pair; may be given several times.")
@click.option(
    "--target-cost",
    multiple=True,
    help="Price of the target, such as 300M, or none for as it is; several make several pairs.  [default: none]",
)
@option_of(EngineSettings, "dtype", is_filled=True)
@option_of(EngineSettings, "max_model_len")
@option_of(SamplingParams, "max_tokens", default=128)
@click.option("--repeats", type=int, default=5, show_default=True, help="Runs of each prompt and row.")
@option_of(SamplingParams, "temperature", default=0.0)
@with_options(*options_of(SamplingParams, "top_k top_p min_p", is_filled=True))
@option_of(SamplingParams, "seed", default=0)
@click.option("--cores", callback=parse_cores, help="Cores, the last one the drafter's.  [default: first and last]")
@click.option(
    "--sps-lengths",
    callback=parse_numbers,
    default="2,3,4,5,6,8,10,12",
    show_default=True,
    help="Draft lengths that sps, ouroboros, card-turns and transformers-assisted choose from.",
)
@option_of(EngineSettings, "draft_vocab")
@option_of(EngineSettings, "hrad", is_filled=True)
@wide_option
@with_options(*(option_of(DraftSettings, name, help=_OF_ROWS) for name in DRAFT_OPTIONS))
@click.option("--coupling-report", is_flag=True, help="Add rows that rank candidates without the sampling noise.")
@click.option(
    "--trace",
    type=OutputFile(),
    help="Decode the first prompt of each data set once more and write what happened when, for ui.perfetto.dev.",
)
@click.option("--out", type=Path, help="JSON lines are appended to it.  [default: bench-DATE-TIME.jsonl]")
@click.option("--resume", type=Path, help="Go on with the last run of this file: exactly what is missing.")
def bench(**options: Any) -> int:
    """Measure methods against each other on the same weights, prompts and cores.

    All rows decode a prompt before the next one comes. Texts are compared before any time is shown. Ctrl-C keeps what
    is done.
    """
    return run("card.cli.bench", **options)
