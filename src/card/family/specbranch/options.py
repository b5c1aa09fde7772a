"""The options of `card train hrad`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.options import counted, file_option, option_of
from card.cli.parts.starting import run
from card.config import EngineSettings
from card.family.learning.options import dtype_option, training_options


@command("hrad", short_help="Train H-RAD, which predicts rejections for method specbranch.")
@training_options
@file_option("--test-prompts", words="Prompts to judge by.  [default: a tenth of the prompts]")
@counted("--num-speculative-tokens", "--gamma", default=4, words="Tokens drafted in a round.", section="Drafting")
@counted("--layers", "num_layers", default=4, words="Last layers of the target.")
@counted("--epochs", default=20, words="Most passes over the data.")
@click.option(
    "--balance",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="Weight of rare outcomes; 1: like common ones.",
)
@counted("--seed", default=0, least=0, words="Same seed, same predictor.")
@dtype_option("auto", "auto (as stored), float32, bfloat16, float16, float64.")
@option_of(EngineSettings, "device", is_filled=True)
@counted("--threads", words="CPU threads.  [default: all cores]", section="Machine")
def hrad(**options: Any) -> int:
    """Train H-RAD: from the target's hidden states it predicts how much of a drafted chain will be accepted.

    The pair answers the prompts greedily by sequential speculation; every round is an example. Training stops by the
    loss on a tenth of the prompts.
    """
    return run("card.family.specbranch.command.run", **options)
