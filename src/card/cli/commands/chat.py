"""The options of `card chat`."""

from __future__ import annotations

from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import draft_options, method_options, model_options, sampling_options, shaping_options


@command(short_help="Talk with the target model.")
@click.option("--stats", is_flag=True, help="Print what each answer cost to standard error.")
@method_options
@sampling_options
@shaping_options
@draft_options
@model_options
def chat(**options: Any) -> int:
    """Talk with the target model.

    /help lists what else may be typed. An empty line or Ctrl-D ends it, Ctrl-C cuts an answer short.
    """
    return run("card.cli.chat", "", **options)
