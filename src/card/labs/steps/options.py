"""The options of `card train router`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.files import OutputPath
from card.cli.parts.options import MOST_RECORDED_TOKENS, counted, file_option, option_of, pair_options
from card.cli.parts.starting import run
from card.config import EngineSettings, SamplingParams


@command("router", short_help="Train a router for --method arbitrage.")
@pair_options
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@counted("--max-prompts", words="Most prompts.")
@click.option("--out", required=True, type=OutputPath(beside=(".steps.jsonl",)), help="File to write.")
@option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS)
@option_of(EngineSettings, "device", is_filled=True)
@counted("--seed", default=0, least=0, words="Same seed, same prompts.")
def router(**options: Any) -> int:
    """Train a router of steps: it predicts whether the target's step would be better than the draft model's.

    Both models write every step, and a checker compares their results with those of the answers, which are worked
    solutions in GSM8K's form. The same command resumes a training that was cut off.
    """
    return run("card.labs.steps.train_command.run", **options)
