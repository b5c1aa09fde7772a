"""`card profile`: what the passes of a model cost on this machine, for `card plan`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from card.cli.progress import spinner
from card.cli.tables import show
from card.planner.measuring import ProfileRequest, measure_profile
from card.planner.profile import Profile, save_profile
from card.planner.sizes import DEFAULT_BATCHES, DEFAULT_CONTEXTS, DEFAULT_TOKENS


def run(
    model: str,
    out: Path,
    dtype: str,
    device: str,
    target_cost: str | None,
    threads: tuple[int, ...] | None,
    tokens: tuple[int, ...] | None,
    contexts: tuple[int, ...] | None,
    batches: tuple[int, ...] | None,
    runs: int,
    wide: bool,
) -> None:
    """Do what `card profile` was asked for."""
    request = ProfileRequest(
        model=model,
        dtype=dtype,
        device=device,
        target_cost=target_cost,
        threads=threads or (),
        tokens=tokens or DEFAULT_TOKENS,
        contexts=contexts or DEFAULT_CONTEXTS,
        batches=batches or DEFAULT_BATCHES,
        num_runs=runs,
        command=" ".join(["card", *sys.argv[1:]]),
    )
    with spinner(f"loading {model}") as say:
        measured = measure_profile(request, say)
    save_profile(measured, out)
    table = _table(measured)
    spare = [str(column.header).replace("\n", " ") for column in table.columns[2:]]
    show(Console(), table, spare=spare, is_wide=wide)
    click.echo(f"written to {out}")


def _table(measured: Profile) -> Table:
    """Return the milliseconds of one sequence; the file holds those of several, too."""
    table = Table("new tokens", box=None, padding=(0, 2, 0, 0), title="milliseconds a pass")
    grids = [(setup.threads, setup.grid) for setup in measured.setups if setup.grid is not None]
    for threads, grid in grids:
        for context in grid.contexts:
            where = "" if threads is None else f"{threads} thread{'s' * (threads > 1)}\n"
            table.add_column(f"{where}{context} rows", justify="right")
    for idx, size in enumerate(grids[0][1].tokens):
        table.add_row(str(size), *(f"{1e3 * row[idx]:.2f}" for _, grid in grids for row in grid.seconds[0]))
    return table
