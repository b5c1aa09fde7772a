"""The options of `card train hivis`."""

from __future__ import annotations

from typing import Any

from card.cli.parts.command import command
from card.cli.parts.options import counted, file_option
from card.cli.parts.starting import run
from card.family.learning.options import head_options


@command("hivis", short_help="Train a drafter for a target that sees images.")
@head_options(is_folder=True)
@file_option("--data", words='JSON lines with "messages".', required=True)
@counted("--width", default=256, words="Of layers.")
@counted("--layers", default=1, words="Decoder layers.")
@counted("--epochs", default=4, words="Most passes over the data.")
def hivis(**options: Any) -> int:
    """Train a drafter that reads text alone and the target's hidden states, for --draft FOLDER.

    The target answers the conversations greedily; they hold messages as of chat completions. Images are data URLs, or
    files below the folder of the data. The same command resumes a training that was cut off.
    """
    return run("card.family.hivis.command.run", **options)
