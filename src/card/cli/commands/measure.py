"""The options of the commands that measure, verify and predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.files import OutputPath
from card.cli.help import command
from card.cli.options import (
    DEMO_DRAFT,
    DEMO_TARGET,
    counted,
    file_option,
    json_option,
    kernels_option,
    neutral_options,
    option_of,
    options_of,
    parse_cores,
    parse_fractions,
    parse_names,
    parse_numbers,
    wide_option,
    with_options,
)
from card.cli.starting import run
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.methods import OWN_SETTINGS
from card.tools.bench.names import DEFAULT_ROWS, DRAFT_OPTIONS, PRESETS, PUBLISHED, ROWS_ALONE, shipped
from card.tools.planner.requests import PoolRequest
from card.tools.verify_server.settings import VerifySettings

_OF_ROWS = "Of card-chain, card-tree, card-turns.  [default: the library's]"


@command(short_help="Measure methods against each other: speed, acceptance, same text.")
@click.option(
    "--methods",
    help=f"Rows, or presets ({', '.join(PRESETS)}), with commas; card+beam,suffix is CARD with these writers.  "
    f"[default: {DEFAULT_ROWS}; {ROWS_ALONE} if a pair has no draft model]",
)
@click.option("--writers", multiple=True, help="One more row: CARD with these writers.")
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
@click.option("--draft", help=f"Draft model, or none.  [default: {DEMO_DRAFT} beside {DEMO_TARGET}]")
@click.option("--pair", nargs=2, multiple=True, metavar="TARGET DRAFT", help="A pair; may be given several times.")
@click.option(
    "--target-cost",
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
@click.option("--cores", callback=parse_cores, help="Cores, the last one the drafter's.  [default: first and last]")
@click.option(
    "--sps-lengths",
    callback=parse_numbers,
    default="2,3,4,5,6,8,10,12",
    show_default=True,
    help="Draft lengths of sps, ouroboros, card-turns, transformers-assisted.",
)
@option_of(EngineSettings, "draft_vocab")
@with_options(*options_of(EngineSettings, " ".join(OWN_SETTINGS), is_filled=True))
@wide_option
@with_options(*(option_of(DraftSettings, name, help=_OF_ROWS) for name in DRAFT_OPTIONS))
@click.option("--coupling-report", is_flag=True, help="Add rows without coupled noise.")
@click.option("--force-acceptance", type=click.FloatRange(0, 1), help="Accept by chance; not exact.")
@click.option("--trace", type=OutputPath(), help="Trace for ui.perfetto.dev.")
@click.option("--out", type=Path, help="JSON lines are appended to it.  [default: bench-DATE-TIME.jsonl]")
@click.option("--resume", type=Path, help="Run what this file lacks.")
def bench(**options: Any) -> int:
    """Measure methods against each other on the same weights, prompts and cores.

    All rows decode a prompt before the next one comes. Texts are compared before any time is shown. Ctrl-C keeps what
    is done.
    """
    return run("card.tools.bench.command.run", **options)


@command(short_help="Make a page and a table of bench files.")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=OutputPath(), help="Write one HTML file that needs nothing else.")
@click.option("--csv", "csv_path", type=OutputPath(), help="Write a line for each pair, row and workload.")
def report(**options: Any) -> int:
    """Read RESULTS, the files of card bench, check that their texts are those of plain decoding, and draw them."""
    return run("card.tools.bench.report.command.run", "reading", **options)


@command("verify-server", short_help="Check that a server writes the same with and without speculation.")
@click.argument("url")
@click.option("--reference", metavar="URL", help="Server without speculation.  [default: the same server]")
@click.option("--plain-fields", metavar="JSON", help='Fields that switch it off, such as {"speculation": "off"}.')
@click.option("--model", help="Name of the model.  [default: its first]")
@click.option("--reference-model", help="The same for --reference.")
@click.option("--api-key", envvar="CARD_API_KEY", help="Key of the server; better in CARD_API_KEY.")
@click.option("--reference-api-key", envvar="CARD_REFERENCE_API_KEY", help="The same for --reference.")
@option_of(VerifySettings, "api", is_filled=True)
@click.option("--only", callback=parse_names, help="Run these alone, such as greedy.")
@click.option("--skip", callback=parse_names, help="Leave out these, such as seeded.")
@file_option("--prompts", words="Prompts, one per line or JSON lines.  [default: word problems]")
@counted("--limit", default=8, least=2, words="Most prompts asked.")
@with_options(*options_of(VerifySettings, "max_tokens concurrency seed temperature", is_filled=True))
@option_of(VerifySettings, "timeout_s", "--timeout", is_filled=True)
@option_of(VerifySettings, "logprob_tolerance", is_filled=True)
@click.option("--json", "json_path", type=OutputPath(), help="Also write all into this file.")
def verify_server(**options: Any) -> int:
    """Ask a server of OpenAI's API the same in many ways, with speculation and without, and compare the answers.

    Exit status 0 if nothing differs, 1 if something does, 2 if the server cannot be used.
    """
    return run("card.tools.verify_server.command.run", "", **options)


@command("verify-machine", short_help="Check that exact passes compute here what they do elsewhere.")
@kernels_option
@json_option
def verify_machine(**options: Any) -> int:
    """Compare a digest of products and logits with the one on record; exit status 1 if they differ."""
    return run("card.cli.verify_machine.run", **options)


@command(short_help="Measure what the passes of a model cost here.")
@click.argument("model")
@click.option("--out", type=OutputPath(), required=True, help="File to write, JSON.")
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "device", is_filled=True, help="cpu, cuda, cuda:1.")
@click.option("--target-cost", help="Inflate the model to the price of 300M, say.")
@click.option("--threads", callback=parse_numbers, help="Such as 1,2.  [default: torch's, one fewer]")
@option_of(EngineSettings, "ctc")
@wide_option
def profile(**options: Any) -> int:
    """Measure what passes of MODEL cost, and what goes on around them.

    MODEL is a folder, a GGUF file, a hub name, demo-target or demo-draft.
    """
    return run("card.tools.planner.command.profile", **options)


@command(short_help="Predict the speed of every method from profiles and a recording.")
@click.option("--target", required=True, help="Profile of the target: file, or shipped.")
@click.option("--draft", help="Profile of the draft model.")
@click.option("--recording", type=click.Path(dir_okay=False, path_type=Path), help="File of card record.")
@click.option("--synthetic", type=float, help="Instead: share of right first choices.")
@click.option("--methods", callback=parse_names, help="Such as vanilla,sps,card.  [default: all]")
@click.option("--cores", type=int, help="CPU threads of both models.  [default: as profiled]")
@click.option("--draft-threads", type=int, default=1, show_default=True, help="Of a drafter's process.")
@click.option("--network-ms", type=float, help="One-way delay of a draft server.")
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests at once.")
@click.option("--search/--no-search", default=True, show_default=True, help="Look for the best settings.")
@click.option("--pool", is_flag=True, help="How many targets can a drafter serve?")
@option_of(PoolRequest, "method", is_filled=True)
@click.option(
    "--delays-ms", default="0,5,20", show_default=True, callback=parse_fractions, help="Pool: delays of the network."
)
@option_of(PoolRequest, "loads", callback=parse_fractions)
@with_options(*options_of(PoolRequest, "min_speed_up max_targets"))
@file_option("--edge", words="Plan this edge.")
@counted("--edge-devices", words="Or draw so many devices.")
@click.option("--edge-place", help="Drawn: even or narrow.  [default: even]")
@file_option("--edge-bench", words="Edge: lines of card bench.")
@json_option
@wide_option
def plan(**options: Any) -> int:
    """Predict speeds, settings and where time goes: the engine runs in virtual time on what was recorded."""
    return run("card.tools.planner.command.plan", **options)
