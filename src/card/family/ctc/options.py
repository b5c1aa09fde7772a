"""The options of `card train ctc`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.options import counted, file_option
from card.cli.parts.starting import run
from card.family.ctc.losses import LOSSES
from card.family.learning.options import head_options


@command("ctc", short_help="Train a head that drafts from the target's states.")
@head_options()
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@click.option("--loss", type=click.Choice(LOSSES), default="ctc", show_default=True, help="Loss.")
@counted("--slots", default=6, words="Of a draft.")
@counted("--window", default=4, words="Rows that it reads.")
@counted("--width", default=256, words="Of its layer.")
@counted("--epochs", default=2, words="Most passes over the data.")
def ctc(**options: Any) -> int:
    """Train a head that drafts from the target's hidden states, for --method ctc or --writers ctc.

    It learns the target's own greedy answers to the questions; the answers of the file are not read. By CTC a slot may
    stay blank; by cross-entropy each slot is one token ahead. The same command resumes a training that was cut off.
    """
    return run("card.family.ctc.command.run", **options)
