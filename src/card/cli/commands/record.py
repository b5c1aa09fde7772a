"""The options of `card record`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import option_of, options_of, sampling_options, with_options
from card.cli.outputs import OutputPath
from card.config import DraftSettings, EngineSettings


@command(short_help="Record how a pair of models behaves, for plans.")
@click.option("--out", type=OutputPath(), required=True, help="File to write.")
@with_options(*options_of(EngineSettings, "target draft"))
@click.option(
    "--data",
    multiple=True,
    default=("questions",),
    show_default=True,
    help="Prompts: shipped ones by name, a file, or NAME=FILE for a published format; as for card bench.",
)
@click.option("--limit", type=click.IntRange(1), help="Most prompts of each data set.  [default: all]")
@click.option("--raw", is_flag=True, help="Continue prompts as they are, without the model's chat template.")
@option_of(EngineSettings, "dtype", is_filled=True)
@option_of(EngineSettings, "device", is_filled=True, help="Device of both models.")
@option_of(DraftSettings, "coupled_noise", is_filled=True, show_default=True)
@sampling_options
def record(**options: Any) -> int:
    """Let the target answer prompts, and write down what target and draft model held likely at each position."""
    return run("card.cli.record", **options)
