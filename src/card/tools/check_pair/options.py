"""The options of `card check-pair`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.options import (
    LEAST_CHECKED_TOKENS,
    counted,
    file_option,
    json_option,
    kernels_option,
    option_of,
    options_of,
    wide_option,
    with_options,
)
from card.cli.parts.starting import run
from card.config import EngineSettings


@command("check-pair", short_help="Measure whether a draft model is worth its while.")
@click.argument("target", required=False)
@click.argument("draft", required=False)
@file_option("--prompts", words="Sample prompts, one per line.  [default: word problems]")
@counted("--max-tokens", default=64, least=LEAST_CHECKED_TOKENS, words="Most new tokens per prompt.", section="Text")
@json_option
@option_of(EngineSettings, "target_cost")
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "device", is_filled=True)
@with_options(*options_of(EngineSettings, "draft_device max_model_len threads draft_threads cores draft_cores"))
@wide_option
def check_pair(**options: Any) -> int:
    """Measure whether DRAFT makes TARGET faster here; both are a folder, a GGUF file or a hub name,
    the built-in pair if left out.

    Exit status 0 for yes, 1 for no, 2 for an error.
    """
    return run("card.tools.check_pair.command.run", **options)
