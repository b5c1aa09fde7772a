"""`card profile`: what the passes of a model cost on this machine, for `card plan`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from card.cli.options import parse_numbers
from card.cli.outputs import OutputPath
from card.planner.measuring import (
    DEFAULT_BATCHES,
    DEFAULT_CONTEXTS,
    DEFAULT_TOKENS,
    ProfileRequest,
    measure_profile,
)
from card.planner.profile import Profile, save_profile


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@click.command(short_help="Measure what the passes of a model cost here.")
@click.argument("model")
@click.option("--out", type=OutputPath(), required=True, help="File to write, JSON.")
@click.option(
    "--dtype", default="auto", show_default=True, help="auto (as stored), float32, bfloat16, float16, float64."
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1.")
@click.option("--target-cost", help="Inflate the model to the price of so many parameters, such as 300M; same outputs.")
@click.option(
    "--threads", callback=parse_numbers, help="Numbers of CPU threads to measure, such as 1,2.  [default: torch's own]"
)
@click.option(
    "--tokens", callback=parse_numbers, help=f"New tokens of a sequence.  [default: {_listed(DEFAULT_TOKENS)}]"
)
@click.option(
    "--contexts", callback=parse_numbers, help=f"Rows that it holds before.  [default: {_listed(DEFAULT_CONTEXTS)}]"
)
@click.option("--batches", callback=parse_numbers, help=f"Sequences.  [default: {_listed(DEFAULT_BATCHES)}]")
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True, help="Timed runs of each pass.")
def profile(
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
) -> None:
    """Measure passes of MODEL (a folder, a hub name, demo-target or demo-draft) over tokens, context and batch."""
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
    with Console(stderr=True).status("") as status:
        measured = measure_profile(request, status.update)
    save_profile(measured, out)
    Console().print(_table(measured))
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
