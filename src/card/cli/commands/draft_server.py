"""The options of `card draft-server`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.options import DEMO_DRAFT, option_of, parse_cores
from card.config import EngineSettings


@command(short_help="Draft for targets on other machines.")
@click.option("--listen", default="tcp://127.0.0.1:5555", show_default=True, help="Address; port 0 takes a free one.")
@click.option(
    "--draft",
    default=DEMO_DRAFT,
    show_default=True,
    help="Draft model: a folder, a GGUF file, a hub name, or demo-draft.",
)
@click.option(
    "--keys", type=click.Path(path_type=Path), help="The server's folder of `card keys`; needed beyond this machine."
)
@option_of(EngineSettings, "dtype", is_filled=True)
@option_of(EngineSettings, "device", is_filled=True, help="cpu, cuda, cuda:1.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads.")
@click.option("--cores", callback=parse_cores, help="CPU cores, such as 0 or 0,1.")
@click.option(
    "--max-model-len", type=click.IntRange(2), default=4096, show_default=True, help="Longest text drafted for."
)
@click.option("--kv-cache-memory", help="Memory for KV rows, such as 2GiB.  [default: 16 texts of full length]")
@click.option("--max-sessions", type=click.IntRange(1), default=16, show_default=True, help="Most clients at once.")
def draft_server(**options: Any) -> int:
    """Load a draft model and draft for every target that connects, until interrupted.

    Prints one line with the address when it is ready. Targets use it with --draft-address.
    """
    return run("card.cli.draft_server", **options)
