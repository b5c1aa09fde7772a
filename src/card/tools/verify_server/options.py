"""The options of `card verify-server`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.files import OutputPath
from card.cli.parts.options import counted, file_option, option_of, options_of, parse_names, with_options
from card.cli.parts.sections import option
from card.cli.parts.starting import run
from card.tools.verify_server.settings import VerifySettings

_compared = partial(option, section="Comparison")


@command("verify-server", short_help="Check that a server writes the same with and without speculation.")
@click.argument("url")
@_compared("--reference", metavar="URL", help="Server without speculation.  [default: the same server]")
@_compared(
    "--plain-fields",
    metavar="JSON",
    help='Fields that switch it off, such as {"speculation": "off"}.',
)
@option("--model", section="Models", help="Name of the model.  [default: its first]")
@_compared("--reference-model", help="The same for --reference.")
@click.option("--api-key", envvar="CARD_API_KEY", help="Key of the server; better in CARD_API_KEY.")
@_compared("--reference-api-key", envvar="CARD_REFERENCE_API_KEY", help="The same for --reference.")
@option_of(VerifySettings, "api", is_filled=True)
@_compared("--only", callback=parse_names, help="Run these alone, such as greedy.")
@_compared("--skip", callback=parse_names, help="Leave out these, such as seeded.")
@file_option("--prompts", words="Prompts, one per line or JSON lines.  [default: word problems]")
@counted("--limit", default=8, least=2, words="Most prompts asked.")
@with_options(*options_of(VerifySettings, "max_tokens concurrency seed temperature", is_filled=True))
@option_of(VerifySettings, "timeout_s", "--timeout", is_filled=True)
@option_of(VerifySettings, "logprob_tolerance", is_filled=True)
@click.option("--json", "json_path", type=OutputPath(), help="Also write all into this file.")
def verify_server(**options: Any) -> int:
    """Ask a server of OpenAI's API the same in many ways, with speculation and without, and compare the answers.

    Exit status 0 if nothing differs, 1 if something does, 2 if the server cannot be used.
    """
    return run("card.tools.verify_server.command.run", "", **options)
