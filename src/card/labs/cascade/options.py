"""The options of `card choose-examples`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.options import counted, file_option, json_option, options_of, pair_options, with_options
from card.cli.parts.starting import run
from card.config import EngineSettings


@command("choose-examples", short_help="Choose examples or instructions by the target's loss.")
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@file_option("--instructions", words="Choose one line instead.")
@counted("--shots", words="Examples.  [default: 2]")
@counted("--candidates", default=64, words="Sets drawn.")
@counted("--held-out", default=8, words="Judging problems.")
@click.option("--regret", is_flag=True, help="Measure the loss.")
@counted("--seed", default=0, least=0, words="Same seed, same sets.")
@counted("--threads", words="CPU threads.  [default: torch's choice]", section="Machine")
@pair_options
@with_options(*options_of(EngineSettings, "dtype device", is_filled=True))
@json_option
def choose_examples(**options: Any) -> int:
    """Choose the examples after which the target's loss on the held-out answers is lowest, among random sets.

    With --instructions an instruction is chosen, which stands before each question.

    The draft model scores all candidates, the target meanwhile a random probe, and then what the draft model's ranking
    leaves: the fewer, the better both rank the probe. The best one may be missed.
    """
    return run("card.labs.cascade.command.run", **options)
