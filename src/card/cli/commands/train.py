"""The options of `card train hrad`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.help import CardGroup
from card.cli.lazy import run
from card.cli.options import option_of, options_of, with_options
from card.config import EngineSettings

_PROMPTS_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(cls=CardGroup, short_help="Train a small model that helps a pair.")
def train() -> None:
    """Train a small model that helps one pair of models."""


@train.command("hrad", short_help="Train H-RAD, which foresees rejections for method specbranch.")
@with_options(*options_of(EngineSettings, "target draft"))
@click.option(
    "--prompts",
    type=_PROMPTS_FILE,
    help='UTF-8 file: one prompt per line, or a JSON object with "question".  [default: a few word problems]',
)
@click.option(
    "--test-prompts",
    type=_PROMPTS_FILE,
    help="File of prompts to judge the result by.  [default: a tenth of the prompts, not learnt from]",
)
@click.option("--max-prompts", type=click.IntRange(1), help="Use so many of the prompts, the first ones.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write, such as hrad.safetensors.",
)
@click.option(
    "--num-speculative-tokens",
    "--gamma",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Tokens drafted in a round; the class says how many of them are accepted.",
)
@click.option(
    "--layers",
    "num_layers",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Last layers of the target to look at.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most new tokens of an answer."
)
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True, help="Most passes over the data.")
@click.option(
    "--balance",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="How much rare outcomes count while it learns: 0 as often as they are, 1 as much as the common ones.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same predictor.")
@click.option(
    "--dtype", default="auto", show_default=True, help="auto (as stored), float32, bfloat16, float16, float64."
)
@option_of(EngineSettings, "device", is_filled=True, help="Device of both models: cpu, cuda, cuda:1.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's choice]")
def hrad(**options: Any) -> int:
    """Train H-RAD: from the target's hidden states it foresees how much of a drafted chain will be accepted.

    The pair answers the prompts greedily by sequential speculation; every round is an example. The rounds of a tenth of
    the prompts say when to stop.
    """
    return run("card.cli.train", **options)
