"""The options of `card demo`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import model_options, wide_option
from card.models.demo import DEMO_PROBLEMS


@command(short_help="Watch the methods side by side on the built-in pair.")
@click.option(
    "--problems", type=int, default=3, show_default=True, help=f"How many problems, at most {len(DEMO_PROBLEMS)}."
)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most new tokens per problem.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampling noise.")
@wide_option
@model_options
def demo(**options: Any) -> int:
    """Answer a few problems with plain decoding, sequential speculation and CARD, and compare text and speed."""
    return run("card.cli.demo", **options)
