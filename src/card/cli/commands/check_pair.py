"""The options of `card check-pair`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import LEAST_CHECKED_TOKENS, parse_cores, wide_option


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
@click.option("--target-cost", help="Inflate the target to the price of so many parameters, such as 300M.")
@click.option(
    "--dtype", default="auto", show_default=True, help="auto (as stored), int8, float32, bfloat16, float16, float64."
)
@click.option("--device", default="cpu", show_default=True, help="Device of the target: cpu, cuda, cuda:1.")
@click.option("--draft-device", help="Device of the draft model.  [default: the target's]")
@click.option(
    "--max-model-len", type=int, help="Most tokens of prompt and answer.  [default: the model's, at most 4096]"
)
@click.option("--threads", type=int, help="CPU threads of the target.  [default: as many as do not slow it down]")
@click.option("--draft-threads", type=int, help="CPU threads of the drafter.  [default: 1]")
@click.option("--cores", callback=parse_cores, help="CPU cores of the target, such as 0 or 0,1.")
@click.option("--draft-cores", callback=parse_cores, help="CPU cores of the drafter.")
@wide_option
def check_pair(**options: Any) -> int:
    """Measure whether DRAFT makes TARGET faster here; both are a folder, a GGUF file or a hub name,
    the built-in pair if left out.

    Exit status 0 for yes, 1 for no, 2 for an error.
    """
    return run("card.cli.check_pair", **options)
