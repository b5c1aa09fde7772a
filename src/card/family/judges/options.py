"""The options of `card train judge` and `card train reward`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.files import OutputPath
from card.cli.parts.options import MOST_RECORDED_TOKENS, counted, file_option, option_of, pair_options
from card.cli.parts.starting import run
from card.config import EngineSettings, SamplingParams
from card.family.learning.options import dtype_option, training_options


@command("judge", short_help="Train AutoJudge for --judge.")
@training_options
@counted("--max-seconds", words="Seconds of mining.")
@dtype_option("float32", "auto: as stored.")
@option_of(EngineSettings, "device", is_filled=True)
def judge(**options: Any) -> int:
    """Train AutoJudge: from the target's hidden state it predicts which mismatches change the answer.

    The target answers the prompts greedily. Where the draft model would have written another token, the target
    continues from that one, and the final numbers are compared. The same command resumes a training that was cut off,
    or out of --max-seconds.
    """
    return run("card.family.judges.command.run", **options)


@command("reward", short_help="Train a reward of steps for --method arbitrage.")
@pair_options
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@counted("--max-prompts", words="Most prompts.")
@click.option("--out", required=True, type=OutputPath(beside=(".mined.jsonl",)), help="File to write.")
@option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS)
@counted("--max-seconds", words="Seconds of mining.")
@dtype_option("float32", "auto: as stored.")
@option_of(EngineSettings, "device", is_filled=True)
def reward(**options: Any) -> int:
    """Train a reward of steps: from the target's hidden state it predicts which drafted steps lose the right answer.

    The target answers the problems greedily; the numbers that end their answers are known. Where the draft model would
    have gone on otherwise, it writes the rest of the step, the target continues, and the final number is checked. The
    same command resumes a training that was cut off, or out of --max-seconds.
    """
    return run("card.family.judges.command.run_reward", **options)
