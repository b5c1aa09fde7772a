"""The options of `card train judge`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.options import counted, option_of
from card.cli.parts.starting import run
from card.config import EngineSettings
from card.family.learning.options import dtype_option, training_options


@command("judge", short_help="Train AutoJudge for --judge.")
@training_options
@click.option("--run-tests", is_flag=True, help="Answers are programs.")
@counted("--max-seconds", words="Seconds of mining.")
@dtype_option("float32", "auto: as stored.")
@option_of(EngineSettings, "device", is_filled=True)
def judge(**options: Any) -> int:
    """Train AutoJudge: from the target's hidden state it predicts which mismatches change the answer.

    The target answers the prompts greedily. Where the draft model would have written another token, the target
    continues from that one, and the final numbers are compared. With --run-tests prompts are tasks of MBPP or
    HumanEval, and their tests are compared; programs run without files and network. The same command resumes a training
    that was cut off, or out of --max-seconds.
    """
    return run("card.family.judges.command.run", **options)
