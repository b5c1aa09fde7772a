"""The options of `card plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import parse_fractions, parse_names, wide_option


@command(short_help="Predict the speed of every method from profiles and a recording.")
@click.option("--target", required=True, help="Profile of the target: a file of card profile, or a shipped one.")
@click.option("--draft", help="Profile of the draft model.")
@click.option(
    "--recording", type=click.Path(dir_okay=False, path_type=Path), help="What the pair does: a file of card record."
)
@click.option(
    "--synthetic",
    type=float,
    help="Instead of a recording: the share of places at which the drafter's first choice is right, from 0 to 1.",
)
@click.option("--methods", callback=parse_names, help="Which methods, such as vanilla,sps,card.  [default: all]")
@click.option("--cores", type=int, help="CPU threads of target and drafter together.  [default: as profiled]")
@click.option("--draft-threads", type=int, default=1, show_default=True, help="Of a drafter in a process of its own.")
@click.option("--network-ms", type=float, help="Put the drafter on a draft server so many milliseconds away, one way.")
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests at once.")
@click.option("--search/--no-search", default=True, show_default=True, help="Look for the best settings.")
@click.option("--pool", is_flag=True, help="Ask instead how many targets one draft server can serve.")
@click.option("--method", default="card", show_default=True, help="Pool: the method of all targets.")
@click.option(
    "--delays-ms", default="0,5,20", show_default=True, callback=parse_fractions, help="Pool: delays of the network."
)
@click.option(
    "--loads",
    default="0.3,0.7,1",
    show_default=True,
    callback=parse_fractions,
    help="Pool: share of time that a target is busy with a drafter of its own; 1: always.",
)
@click.option("--min-speed-up", type=float, help="Pool: over plain decoding.  [default: 90 % of one target's]")
@click.option("--max-targets", type=int, default=4096, show_default=True, help="Pool: no more are tried.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
@wide_option
def plan(**options: Any) -> int:
    """Predict speeds, settings and where time goes: the engine runs in virtual time on what was recorded."""
    return run("card.cli.plan", **options)
