"""The options of `card report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.cli.help import command
from card.cli.lazy import run
from card.cli.outputs import OutputPath

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = OutputPath()


@command(short_help="Make a page, pictures and a table of bench files.")
@click.argument("results", nargs=-1, required=True, type=_FILE)
@click.option("--out", type=_NEW_FILE, help="Write one HTML file that needs nothing else.")
@click.option("--png", type=OutputPath(is_folder=True), help="Write each plot into this folder.")
@click.option("--csv", "csv_path", type=_NEW_FILE, help="Write a line for each pair, row and workload.")
@click.option("--trace", type=_FILE, help="Draw the timeline of this trace too, as written by --trace.")
def report(**options: Any) -> int:
    """Read RESULTS, the files of card bench, check that their texts are those of plain decoding, and draw them."""
    return run("card.cli.bench_report", "reading", **options)
