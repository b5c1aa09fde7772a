"""`card profile`: what the passes of a model cost on this machine, for `card plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from card.cli.options import command_line, given
from card.cli.starting import spinner
from card.cli.tables import show, table
from card.planner.measuring import measure_profile
from card.planner.profile import Profile, save_profile
from card.planner.requests import ProfileRequest


def run(out: Path, wide: bool, **options: Any) -> None:
    """Do what `card profile` was asked for."""
    request = ProfileRequest(command=command_line(), **given(options))
    with spinner(f"loading {request.model}") as say:
        measured = measure_profile(request, say)
    save_profile(measured, out)
    shown = _table(measured)
    spare = [str(column.header).replace("\n", " ") for column in shown.columns[2:]]
    show(Console(), shown, spare=spare, is_wide=wide)
    click.echo(f"written to {out}")


def _table(measured: Profile) -> Table:
    """Return the milliseconds of one sequence; the file holds those of several, too."""
    shown = table("new tokens", title="milliseconds a pass")
    grids = [(setup.threads, setup.grid) for setup in measured.setups if setup.grid is not None]
    for threads, grid in grids:
        for context in grid.contexts:
            where = "" if threads is None else f"{threads} thread{'s' * (threads > 1)}\n"
            shown.add_column(f"{where}{context} rows", justify="right")
    for idx, size in enumerate(grids[0][1].tokens):
        shown.add_row(str(size), *(f"{1e3 * row[idx]:.2f}" for _, grid in grids for row in grid.seconds[0]))
    return shown
