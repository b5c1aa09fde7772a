"""The options of `card profile`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import option_of, parse_numbers, wide_option
from card.cli.outputs import OutputPath
from card.config import EngineSettings
from card.planner.sizes import DEFAULT_BATCHES, DEFAULT_CONTEXTS, DEFAULT_TOKENS


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@command(short_help="Measure what the passes of a model cost here.")
@click.argument("model")
@click.option("--out", type=OutputPath(), required=True, help="File to write, JSON.")
@option_of(EngineSettings, "dtype", is_filled=True)
@option_of(EngineSettings, "device", is_filled=True, help="cpu, cuda, cuda:1.")
@click.option("--target-cost", help="Inflate the model to the price of so many parameters, such as 300M; same outputs.")
@click.option(
    "--threads", callback=parse_numbers, help="Numbers of CPU threads to measure, such as 1,2.  [default: torch's own]"
)
@click.option(
    "--tokens", callback=parse_numbers, help=f"New tokens of a sequence.  [default: {_listed(DEFAULT_TOKENS)}]"
)
@click.option(
    "--contexts", callback=parse_numbers, help=f"Rows that it holds before.  [default: {_listed(DEFAULT_CONTEXTS)}]"
)
@click.option("--batches", callback=parse_numbers, help=f"Sequences.  [default: {_listed(DEFAULT_BATCHES)}]")
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True, help="Timed runs of each pass.")
@wide_option
def profile(**options: Any) -> int:
    """Measure passes of MODEL over tokens, context and batch.

    MODEL is a folder, a GGUF file, a hub name, demo-target or demo-draft.
    """
    return run("card.cli.profile", **options)
