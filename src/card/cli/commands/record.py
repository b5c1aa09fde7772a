"""The options of `card record`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import sampling_options
from card.cli.outputs import OutputPath


@command(short_help="Record how a pair of models behaves, for plans.")
@click.option("--out", type=OutputPath(), required=True, help="File to write.")
@click.option(
    "--target", help="Target model: a folder, a GGUF file, a hub name, or demo-target.  [default: demo-target]"
)
@click.option("--draft", help="Draft model: the same, or demo-draft, the default beside demo-target.")
@click.option(
    "--data",
    multiple=True,
    default=("questions",),
    show_default=True,
    help="Prompts: shipped ones by name, a file, or NAME=FILE for a published format; as for card bench.",
)
@click.option("--limit", type=click.IntRange(1), help="Most prompts of each data set.  [default: all]")
@click.option("--raw", is_flag=True, help="Continue prompts as they are, without the model's chat template.")
@click.option(
    "--dtype", default="auto", show_default=True, help="auto (as stored), int8, float32, bfloat16, float16, float64."
)
@click.option("--device", default="cpu", show_default=True, help="Device of both models.")
@click.option(
    "--coupled-noise/--no-coupled-noise",
    default=True,
    show_default=True,
    help="Whether the drafter ranks candidates with the target's sampling noise.",
)
@sampling_options
def record(**options: Any) -> int:
    """Let the target answer prompts, and write down what target and draft model held likely at each position."""
    return run("card.cli.record", **options)
