"""The options of `card train pard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.files import NamedPath, OutputPath
from card.cli.parts.options import counted, option_of, pair_options
from card.cli.parts.starting import run
from card.config import EngineSettings


@command("pard", short_help="Adapt a draft model to draft several tokens a pass.")
@pair_options
@click.option(
    "--data",
    required=True,
    type=NamedPath(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines with "question" and "answer".',
)
@click.option("--out", required=True, type=OutputPath(is_folder=True), help="Folder to write.")
@click.option("--target-features", is_flag=True, help="Read the target's states.")
@counted("--num-tokens", default=8, least=2, words="Tokens of a pass.")
@click.option("--retention", type=click.FloatRange(0, 1), default=0.7, show_default=True, help="Masks kept.")
@click.option("--least-retention", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="Always.")
@click.option("--learning-rate", type=float, help="Peak.  [default: by size]")
@counted("--epochs", default=1, words="Most passes over the data.")
@option_of(EngineSettings, "device", is_filled=True)
@counted("--seed", default=0, least=0, words="Same seed, same weights.")
def pard(**options: Any) -> int:
    """Adapt a draft model to draft several tokens a pass (PARD).

    With a target it learns the target's distributions, weighted by their chance to matter (PARD-2).
    The answers are learnt. Lines may also be JSON with "text", or plain text. The same command resumes a training that
    was cut off.
    """
    return run("card.family.pard.command.run", **options)
