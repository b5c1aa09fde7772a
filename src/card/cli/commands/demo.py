"""The options of `card demo`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import model_options, option_of, wide_option
from card.config import SamplingParams
from card.models.demo import DEMO_PROBLEMS


@command(short_help="Watch the methods side by side on the built-in pair.")
@click.option(
    "--problems", type=int, default=3, show_default=True, help=f"How many problems, at most {len(DEMO_PROBLEMS)}."
)
@option_of(SamplingParams, "max_tokens", default=128, help="Most new tokens per problem.")
@option_of(SamplingParams, "temperature", default=0.0)
@option_of(SamplingParams, "seed", default=0)
@wide_option
@model_options
def demo(**options: Any) -> int:
    """Answer a few problems with plain decoding, sequential speculation and CARD, and compare text and speed."""
    return run("card.cli.demo", **options)
