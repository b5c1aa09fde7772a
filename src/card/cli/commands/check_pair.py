"""The options of `card check-pair`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import LEAST_CHECKED_TOKENS, option_of, options_of, wide_option, with_options
from card.config import EngineSettings


@command("check-pair", short_help="Measure whether a draft model is worth its while.")
@click.argument("target", required=False)
@click.argument("draft", required=False)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 file of sample prompts, one per line.  [default: a few word problems]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(LEAST_CHECKED_TOKENS),
    default=64,
    show_default=True,
    help="Most new tokens per prompt.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
@option_of(EngineSettings, "target_cost")
@option_of(EngineSettings, "dtype", is_filled=True)
@option_of(EngineSettings, "device", is_filled=True)
@with_options(*options_of(EngineSettings, "draft_device max_model_len threads draft_threads cores draft_cores"))
@wide_option
def check_pair(**options: Any) -> int:
    """Measure whether DRAFT makes TARGET faster here; both are a folder, a GGUF file or a hub name,
    the built-in pair if left out.

    Exit status 0 for yes, 1 for no, 2 for an error.
    """
    return run("card.cli.check_pair", **options)
