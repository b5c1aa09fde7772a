"""The options of `card train eagle`."""

from __future__ import annotations

from typing import Any

from card.cli.parts.command import command
from card.cli.parts.options import counted, file_option, option_of
from card.cli.parts.starting import run
from card.config import EngineSettings
from card.family.learning.options import head_options


@command("eagle", short_help="Train an EAGLE-3 head for a target.")
@head_options(is_folder=True)
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@option_of(EngineSettings, "draft_vocab", default=16_384)
@counted("--mlp-width", words="Of its layer.  [default: 8/3 of the target's]")
@counted("--epochs", default=2, words="Most passes over the data.")
def eagle(**options: Any) -> int:
    """Train a head that drafts from states of three layers of the target, for --draft FOLDER.

    It learns the target's own greedy answers to the questions; the answers of the file are not read. Other engines read
    the folder, too. The same command resumes a training that was cut off.
    """
    return run("card.family.eagle.command.run", **options)
