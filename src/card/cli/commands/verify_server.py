"""The options of `card verify-server`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import parse_names
from card.cli.outputs import OutputPath


@command("verify-server", short_help="Check that a server writes the same with and without speculation.")
@click.argument("url")
@click.option(
    "--reference",
    metavar="URL",
    help="Server of the same model without speculation.  [default: the same server, switched off in each request]",
)
@click.option("--plain-fields", metavar="JSON", help='Fields that switch it off, such as {"speculation": "off"}.')
@click.option("--model", help="Name of the model.  [default: the first one that the server lists]")
@click.option("--reference-model", help="The same for --reference.")
@click.option(
    "--api-key",
    envvar="CARD_API_KEY",
    help="Key of the server; better in CARD_API_KEY, where no process list shows it.",
)
@click.option("--reference-api-key", envvar="CARD_REFERENCE_API_KEY", help="The same for --reference.")
@click.option("--api", default="auto", show_default=True, help="Ask by chat, completions, or what works (auto).")
@click.option("--only", callback=parse_names, help="Run these checks alone, such as greedy,stream.")
@click.option("--skip", callback=parse_names, help="Leave out these checks, such as seeded,seeded-batch.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts to ask: one per line, or JSON lines with a question each.  [default: shipped word problems]",
)
@click.option("--limit", type=click.IntRange(2), default=8, show_default=True, help="Most prompts asked.")
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Most new tokens of an answer.")
@click.option("--concurrency", type=int, default=4, show_default=True, help="Questions at once in batches.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the first seeded question.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Of the seeded questions.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds for one answer.")
@click.option(
    "--logprob-tolerance",
    type=float,
    default=0.1,
    show_default=True,
    help="Log-probabilities of a token that are no further apart count as equal.",
)
@click.option("--json", "json_path", type=OutputPath(), help="Write all that was found into this file, too.")
def verify_server(**options: Any) -> int:
    """Ask a server of OpenAI's API the same in many ways, with speculation and without, and compare the answers.

    Exit status 0 if nothing differs, 1 if something does, 2 if the server cannot be used.
    """
    return run("card.cli.verify_server", "", **options)
